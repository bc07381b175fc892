"""Results on disk, and tables, comparisons and plots of them."""
