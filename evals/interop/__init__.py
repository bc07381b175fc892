"""Weights to other programs, and from them: exports with their cards, and what a run begins with."""
