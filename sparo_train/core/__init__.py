"""The floor: errors, configuration, random streams, the run folder, checkpoints, metrics, signals."""
