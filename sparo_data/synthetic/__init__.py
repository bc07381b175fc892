"""Generated data sets: captioned scenes, scenes of objects, Tetrominoes, videos, and scenes with several cameras."""
