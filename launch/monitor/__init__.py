"""Watching jobs: their state and progress, logs, requests to them, and the check of a cluster."""
