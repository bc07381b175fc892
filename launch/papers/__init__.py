"""The five papers: their tables and figures, sweeps that reproduce them, and tests of their claims."""
