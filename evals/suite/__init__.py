"""Evaluation tasks: requirements on encoders, data to encode, and scoring."""
