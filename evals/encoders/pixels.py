"""What happens to an image before a model sees it: values that say what they do, so that stored features can name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from sparo_train.core.errors import ConfigError
from sparo_train.data.examples.transforms import eval_pixels, shortest_side


@dataclass(frozen=True)
class Pixels:
    """Shortest side to `resize` (bicubic, antialiased), the middle cut out: (size, size, 3) uint8."""

    size: int
    resize: int

    def __call__(self, image: Image.Image) -> np.ndarray:
        return eval_pixels(image, self.size, self.resize)


@dataclass(frozen=True)
class FlooredPixels(Pixels):
    """The same with the crop's corner rounded down, as Hugging Face's processors cut."""

    def __call__(self, image: Image.Image) -> np.ndarray:
        image = shortest_side(image, self.resize)
        # torchvision rounds half to even here, and half a pixel is another picture.
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return np.asarray(image.crop((left, top, left + self.size, top + self.size)))


@dataclass(frozen=True)
class SquarePixels(Pixels):
    """The whole image to a square, its sides stretched as they come, as ViT, DeiT, BEiT and SigLIP have it."""

    bicubic: bool = True

    def __call__(self, image: Image.Image) -> np.ndarray:
        how = Image.Resampling.BICUBIC if self.bicubic else Image.Resampling.BILINEAR
        return np.asarray(image.resize((self.size, self.size), how))


class LibraryPixels:
    """A library's own evaluation transform up to pixels: what comes before its ToTensor and Normalize.

    Args:
        steps: the transforms of a `torchvision.transforms.Compose` whose last two are those.
        origin: whose transform it is, for errors.
    """

    def __init__(self, steps: Sequence[Any], origin: str):
        tail = [type(step).__name__ for step in steps[-2:]]
        if len(tail) < 2 or not tail[0].endswith("ToTensor") or tail[1] != "Normalize":
            raise ConfigError(f"{origin}: its transform ends with {tail}, not with ToTensor and Normalize")
        self._steps, self._normalize = list(steps[:-2]), steps[-1]

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(float(v) for v in self._normalize.mean)

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(float(v) for v in self._normalize.std)

    def __call__(self, image: Image.Image) -> np.ndarray:
        # The library's own steps, one by one: what is scored has seen what its authors' code shows.
        for step in self._steps:
            image = step(image)
        return np.asarray(image)

    def __repr__(self) -> str:
        return "; ".join(" ".join(repr(step).split()) for step in self._steps)
