"""Evaluation data on disk: images by number, each with its annotations."""
