"""The floor: recipes, open tables, contracts, ranks, errors, random streams; in `disk` what a run keeps."""
