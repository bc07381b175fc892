"""Encoders of images (and texts, if they have a text tower): runs, exports, foreign models, masks; and their export."""
