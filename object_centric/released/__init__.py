"""Readers of slot models that others released."""
