"""Scenes seen by several posed cameras: encoders of views, ray decoders, and the objective that trains both."""
