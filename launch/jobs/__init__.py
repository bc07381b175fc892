"""Jobs on clusters: describing, submitting, watching and repeating them."""
