"""The commands of `sparo`, a rank's program, and how a process ends."""
