"""`sparo slots explore`: a local page on which a user inspects slots, switches them on and off, names them, and saves the selection."""
