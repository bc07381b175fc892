"""Scores of objects, in images, videos and posed scenes: masks, sets, what is drawn, what slots say."""
