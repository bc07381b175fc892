"""Engines run objectives on devices. They import no model."""
