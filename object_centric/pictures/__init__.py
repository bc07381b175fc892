"""Pictures of slot models."""
