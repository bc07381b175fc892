"""What slots of a video begin from where its first frame's objects are told: boxes, their centres, or masks (Kipf et al. 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, field

from ..encoders.convnet import ConvNetConfig


class HintConfig(Frozen):
    """Object number k of the first frame is slot k, and slot 0 the ground's: what is told of it is zeros."""

    of: Literal["boxes", "centres", "masks"] = field(
        "boxes",
        "what is told of an object: top, left, bottom, right in 0..1; the middle of that; or which pixels it has",
    )
    hidden: int = field(256, "hidden units of the perceptron that makes slots of it", gt=0)
    encoder: ConvNetConfig = field(
        ConvNetConfig(channels=(32, 32, 32, 32), strides=(2, 2, 2, 2)), "of masks: what sees each of them on its own"
    )

    def build(self, slots: int, width: int, image_size: int) -> nn.Module:
        """Label maps (b, S, S) to slots (b, K, D)."""
        return Hint(self, slots, width, image_size)


class Hint(nn.Module):
    """Label maps (b, S, S) of first frames to slots (b, K, D). An object that is not seen there is told as the ground is, by zeros."""

    def __init__(self, config: HintConfig, slots: int, width: int, image_size: int):
        super().__init__()
        self.config, self.slots = config, slots
        in_widths = {"boxes": 4, "centres": 2, "masks": config.encoder.width * config.encoder.side(image_size) ** 2}
        self.see = config.encoder.build() if config.of == "masks" else None
        self.tell = nn.Sequential(
            nn.Linear(in_widths[config.of], config.hidden), nn.ReLU(), nn.Linear(config.hidden, width)
        )

    def forward(self, labels: Tensor) -> Tensor:
        c = self.config
        if c.of == "masks":
            assert self.see is not None
            # The ground's is zeros, as of an object that is not there.
            masks = F.one_hot(labels.long(), self.slots).movedim(-1, 1).to(self.tell[0].weight.dtype)  # type: ignore[union-attr, arg-type]
            # The ground has no box in SAVi's data: what is told of it would be learned as an object.
            masks = masks * (torch.arange(self.slots, device=labels.device) > 0)[:, None, None]
            mask_features = self.see(masks.flatten(0, 1)[:, None].expand(-1, 3, -1, -1))
            return self.tell(mask_features.flatten(1)).unflatten(0, (len(labels), self.slots))
        boxes = boxes_from_labels(labels, self.slots)
        coordinates = boxes if c.of == "boxes" else (boxes[..., :2] + boxes[..., 2:]) / 2
        return self.tell(coordinates)


def boxes_from_labels(labels: Tensor, slots: int) -> Tensor:
    """Label maps (b, S, S) to (b, K, 4) fp32: top, left, bottom, right of each number's pixels in 0..1; zeros of 0, and where it is not."""
    side = labels.shape[-1]
    masks = labels[:, None] == torch.arange(slots, device=labels.device)[:, None, None]
    ends = []
    for axis in (3, 2):  # rows with a pixel of it, then columns
        line = masks.any(axis)
        first = line.float().argmax(-1)
        # Behind the last pixel, so that a box of one pixel has a size.
        last = side - line.flip(-1).float().argmax(-1)
        ends.append((first, last))
    (top, bottom), (left, right) = ends
    boxes = torch.stack([top, left, bottom, right], -1).float() / side
    visible = masks.flatten(2).any(-1) & (torch.arange(slots, device=labels.device) > 0)
    return boxes * visible[..., None]
