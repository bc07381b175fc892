"""`sparo slots explore`: a local page on which a person looks at slots, switches them, names them, and saves the choice."""
