"""Helpers that several test modules use. Fixtures are in the conftest of their folder."""
