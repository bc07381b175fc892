"""Tasks as functions of features; they depend on no files or models."""
