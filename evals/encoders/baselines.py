"""Baselines without a model: `pixels:SIZE`, and `voronoi:SLOTS@SIZE`, which divides images without looking at them (Biza et al. 2023, Karazija et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparo_train.core.errors import ConfigError

from .capabilities import MasksEncoder
from .encoder import Encoder
from .pixels import Pixels


class PixelEncoder(Encoder):
    """Encodings that are an image's pixels at `size`."""

    def __init__(self, size: int = 28):
        # An unused layer: every encoder has a model, whose device determines where pixels go.
        super().__init__(nn.Linear(1, 1), (0.0,) * 3, (1.0,) * 3, f"pixels:{size}")
        self.image_size, self.transform = size, Pixels(size, size, rgb_first=True)

    @property
    def width(self) -> int:
        return 3 * self.image_size**2

    @property
    def architecture(self) -> str:
        return self.label

    @property
    def weights(self) -> str:
        return "none"

    def encode(self, pixels: Tensor) -> Tensor:
        return self.normalize(pixels).flatten(1)


class VoronoiEncoder(Encoder, MasksEncoder):
    """Masks of an image: the cells of random points, drawn for each image.

    A slot model that has collapsed to masks by position scores about as much.
    """

    masks_are = "cells of random points"

    def __init__(self, slots: int, size: int):
        # An unused layer: every encoder has a model, whose device determines where pixels go.
        super().__init__(nn.Linear(1, 1), (0.0,) * 3, (1.0,) * 3, f"voronoi:{slots}@{size}")
        self.slots, self.image_size, self.transform = slots, size, Pixels(size, size, rgb_first=True)

    @property
    def width(self) -> int:
        return 2 * self.slots

    @property
    def architecture(self) -> str:
        return self.label

    @property
    def weights(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "none"

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the points (n, 2 * K), in 0..1, drawn from the image's sum, so that they do not depend on its batch."""
        sums = pixels.flatten(1).sum(1, dtype=torch.int64).tolist()
        drawn = [torch.rand(self.slots, 2, generator=torch.Generator().manual_seed(total)) for total in sums]
        return torch.stack(drawn).flatten(1).to(pixels.device)

    def masks(self, pixels: Tensor) -> Tensor:
        points = self.encode(pixels).unflatten(1, (self.slots, 2))
        centers = (torch.arange(self.image_size, device=pixels.device) + 0.5) / self.image_size
        places = torch.cartesian_prod(centers, centers).to(points.dtype)
        return torch.cdist(places.expand(len(points), -1, -1), points).argmin(-1).float()


def parse_pixels(text: str) -> Encoder:
    """Return the encoder of `pixels:SIZE`: the pixels themselves, as a baseline."""
    if not text.isdigit() or not int(text):
        raise ConfigError(f"pixels:{text}: expected pixels:SIZE, as in pixels:28")
    return PixelEncoder(int(text))


def parse_voronoi(text: str) -> Encoder:
    """Return the encoder of `voronoi:SLOTS@SIZE`."""
    slots, _, size = text.partition("@")
    if not (slots.isdecimal() and size.isdecimal() and 0 < int(slots) <= 4096 and 0 < int(size) <= 4096):
        raise ConfigError(f"voronoi:{text}: expected voronoi:SLOTS@SIZE with both from 1 to 4096, as in voronoi:11@128")
    return VoronoiEncoder(int(slots), int(size))
