"""What a recipe is written as: its YAML, the layers that it is put together from, and which keys there are."""
