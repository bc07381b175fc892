"""What slot models see, as pictures."""
