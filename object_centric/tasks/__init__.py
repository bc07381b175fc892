"""Slot models in evaluation: encoders, and scores of their masks."""
