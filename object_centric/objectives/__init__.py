"""What slot models learn from."""
