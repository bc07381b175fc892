"""Scenes that several posed cameras see: what encodes views, what draws rays from slots, and the objective that trains both."""
