"""Published object-centric data sets, as their authors store them, to our shards."""
