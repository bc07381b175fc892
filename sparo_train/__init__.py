"""`sparo_train`: everything that trains. See docs/architecture.md for the map."""

__version__ = "0.1.0"
