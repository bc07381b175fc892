"""Files of a run: its folder and lease, metrics, and sharded checkpoints."""
