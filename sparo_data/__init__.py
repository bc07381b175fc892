"""Data sets made here: scenes, emoji, conversions; and looking into shards. No trainer imports it."""
