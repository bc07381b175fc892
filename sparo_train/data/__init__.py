"""Shards, the plan that says who reads what, and the batches that carry their cursor."""
