"""Slot models that others released: their files, as encoders of ours."""
