"""What draws solids: a ray tracer of our own, and Blender in its place where colours are to be real."""
