"""Readouts other than the paper's own (models/sparo.py), each an entry of `sparo.readouts`."""
