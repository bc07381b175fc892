"""Slots of videos: recurrent ones and those that bind all times at once, and the objectives that train them."""
