"""Foundations: recipes, registries, contracts, ranks, errors, random streams, and (in `disk`) the files of a run."""
