"""Rendering of solids: our ray tracer, and Blender for realistic colours."""
