"""A file with a small backbone, as a teacher of distillation."""

import torch

from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig


def write_teacher(path, **changes):
    """Write a file with two blocks of DINOv2-S's width, so that the number of heads is known; return the model."""
    torch.manual_seed(1)
    keys = {
        "image_size": 32,
        "patch_size": 8,
        "width": 384,
        "depth": 2,
        "heads": 6,
        "registers": 4,
        "layer_scale": 1.0,
        **changes,
    }
    model = Vit(VitConfig.model_validate(keys)).eval()
    with torch.no_grad():  # channels whose means and scales differ from those of a new network
        model.norm.weight.copy_(torch.linspace(0.5, 3, 384))
        model.norm.bias.copy_(torch.linspace(-2, 4, 384))
    torch.save(model.state_dict(), path)
    return model
