"""Objectives of slot models."""
