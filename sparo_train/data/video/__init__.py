"""Videos as samples: the format of an episode, and the choice of frames of a clip."""
