"""From slots back to pixels."""
