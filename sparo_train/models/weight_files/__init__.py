"""Weight files: ours, open_clip's, DINO's, DeepSpeed's; and recognition of the model that weights belong to."""
