"""Grouping of features to slots: one attention core whose options give every published variant, and its equivariant form."""
