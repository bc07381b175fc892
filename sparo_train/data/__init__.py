"""Data: shards, the plan that orders samples, and batches that carry their cursor."""
