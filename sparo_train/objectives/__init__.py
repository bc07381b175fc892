"""Training objectives. The trainer knows none of them by name."""
