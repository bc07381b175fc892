"""Recipes as files: YAML, the layers that they are assembled from, and the list of valid keys."""
