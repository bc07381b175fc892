"""Losses and what follows a step; the trainer knows none of them."""
