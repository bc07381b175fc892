"""Converters of published object-centric data sets, in their authors' formats, to shards."""
