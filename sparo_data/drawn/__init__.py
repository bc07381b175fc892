"""Data sets that are drawn here: captioned scenes, scenes of objects, Tetrominoes, and what draws them."""
