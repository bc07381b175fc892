"""From features to slots: one attention core whose knobs make every published variant, and its equivariant form."""
