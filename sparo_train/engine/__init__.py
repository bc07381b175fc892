"""Engines run objectives on devices; an engine imports no model."""
