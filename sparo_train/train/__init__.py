"""The resolved recipe and the training loop."""
