"""A null GPU: runs torch's CUDA code paths on a machine without a GPU. README.md lists what it can show."""
