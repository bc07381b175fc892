"""Tasks are functions of features; they know no files and no models."""
