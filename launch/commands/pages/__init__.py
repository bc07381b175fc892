"""What commands and trainings draw: panels, pages, galleries of slots, turns around scenes."""
