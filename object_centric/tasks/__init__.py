"""Slot models in evaluation: what encodes with them, and how their masks are scored."""
