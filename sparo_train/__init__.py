"""Everything that trains. docs/architecture.md has the map; programs import the public names from `sparo`."""

__version__ = "0.1.0"
