"""Readouts and towers. Models do not depend on ranks."""
