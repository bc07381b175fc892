"""What a batch holds: image-text pairs, multi-crops, and how pixels and texts become them."""
