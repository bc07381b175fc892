"""Slots of videos: recurrent ones, and those that bind all times at once, with their objectives."""
