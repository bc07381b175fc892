"""The resolved run and the one loop."""
