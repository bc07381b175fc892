"""Videos as samples: the format of an episode, and which of its frames a clip takes."""
