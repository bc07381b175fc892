"""Scoring: encoders, tasks as pure functions of features, results with n and an interval."""
