"""Commands that run on this machine: training, data, the demo."""
