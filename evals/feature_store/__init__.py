"""The feature store: every image is encoded once per checkpoint."""
