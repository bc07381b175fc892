"""Decoders from slots to pixels."""
