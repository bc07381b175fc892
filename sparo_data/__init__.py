"""Data sets: generated scenes, emoji, and conversions to shards; checks and benchmarks of shards. Training does not import it."""
