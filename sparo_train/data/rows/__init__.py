"""Formats whose samples are rows with columns."""
