"""The command line and what it sets in motion: where the parts are put together."""
