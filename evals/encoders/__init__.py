"""Whatever encodes images, and texts where it has a tower for them: runs, exports, foreign models, masks; and their export."""
