"""Data sets that are drawn here: captioned scenes, scenes of objects, Tetrominoes, videos, and scenes of several cameras."""
