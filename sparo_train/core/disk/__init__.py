"""What a run keeps on disk: its folder and who owns it, metrics, checkpoints in pieces."""
