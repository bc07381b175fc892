"""Scores of objects in images, videos and posed scenes: masks, sets, reconstructions, and probes of slots."""
