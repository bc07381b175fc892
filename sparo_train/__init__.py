"""Everything that trains. docs/explanation/architecture.md has the map; programs import the public names from `sparo`."""

__version__ = "0.2.0"
