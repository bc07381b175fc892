"""Tasks by name: what each needs, what has to be encoded for it, and who scores it."""
