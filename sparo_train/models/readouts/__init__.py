"""Read-outs beside the paper's own (models/sparo.py): each a row of `sparo.readouts`."""
