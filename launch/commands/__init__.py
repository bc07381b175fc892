"""What a command does on this machine: train a recipe, make data, the demo."""
