"""Analysis of slots after training: scores of single slots, selections, masks, and quality measures."""
