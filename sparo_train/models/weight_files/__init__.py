"""Weights as files: ours, open_clip's, DINO's, DeepSpeed's; and which model a set of weights belongs to."""
