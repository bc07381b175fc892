"""Reading of data: sources, shards, the plan, the cursor and the loader."""
