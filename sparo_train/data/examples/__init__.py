"""Content of batches: image-text pairs, multi-crops, and how pixels and texts are prepared."""
