"""Read-outs beside the paper's own (models/sparo.py): one file, one row of `sparo.readouts`, one test each."""
