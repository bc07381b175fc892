"""Who reads what: sources, shards, the plan, the cursor and the loader."""
