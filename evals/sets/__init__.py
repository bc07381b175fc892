"""Evaluation data on disk: images by number, each with what is known of it."""
