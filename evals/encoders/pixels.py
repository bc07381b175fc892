"""Preprocessing of images as values with names, so that stored features can record them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.decode.decoding import Decoding, to_8bit, to_bands
from sparo_train.data.examples.image_transforms import centre, eval_pixels, shortest_side, thin_centre


@dataclass(frozen=True)
class Pixels:
    """Resize the shorter side to `resize` (bicubic, antialiased) and crop the centre: (size, size, 3) uint8.

    rgb_first: convert to RGB before the resize, as timm, DINO and torchvision's folders do. open_clip resizes in the
    file's own mode and converts afterwards, so palettes, transparency and 16 bits give other pixels.
    """

    size: int
    resize: int
    rgb_first: bool = False

    def __call__(self, image: Image.Image) -> np.ndarray:
        image = image.convert("RGB") if self.rgb_first else image
        return np.asarray(centre(image, self.size, self.resize).convert("RGB"))

    def labels(self, image: Image.Image) -> np.ndarray:
        """Return a label image (size, size) that shows the same part, by nearest neighbours, because labels cannot be averaged."""
        return eval_pixels(image, self.size, self.resize, Image.Resampling.NEAREST)


@dataclass(frozen=True)
class MappedPixels(Pixels):
    """The same, after mapping 16-bit, 32-bit and float pixels to 8 bits according to a run's `data.pixel_range`."""

    pixel_range: PixelRange = "by_type"

    def __call__(self, image: Image.Image) -> np.ndarray:
        return super().__call__(to_8bit(image, self.pixel_range))


@dataclass(frozen=True)
class BandPixels(Pixels):
    """Chosen bands of an image (size, size, bands), resized by torch as in training: of a file's image, or of an array (H, W, all bands)."""

    pixel_range: PixelRange = "by_type"
    bands: tuple[int, ...] = ()

    def __call__(self, image: Image.Image | np.ndarray) -> np.ndarray:
        how = Decoding(pixel_range=self.pixel_range, bands=self.bands)
        return eval_pixels(to_bands(image, how), self.size, self.resize)


@dataclass(frozen=True)
class FlooredPixels(Pixels):
    """The same with the crop's corner rounded down, as in Hugging Face's processors."""

    def __call__(self, image: Image.Image) -> np.ndarray:
        return self._crop(shortest_side(image.convert("RGB"), self.resize))

    def labels(self, image: Image.Image) -> np.ndarray:
        return self._crop(shortest_side(image, self.resize, Image.Resampling.NEAREST))

    def _crop(self, image: Image.Image) -> np.ndarray:
        # torchvision rounds half to even here, which shifts the crop by a pixel.
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return np.asarray(image.crop((left, top, left + self.size, top + self.size)))


@dataclass(frozen=True)
class SquarePixels(Pixels):
    """Resize the whole image to a square, ignoring its aspect ratio, as in ViT, DeiT, BEiT and SigLIP."""

    bicubic: bool = True

    def __call__(self, image: Image.Image) -> np.ndarray:
        how = Image.Resampling.BICUBIC if self.bicubic else Image.Resampling.BILINEAR
        return np.asarray(image.convert("RGB").resize((self.size, self.size), how))

    def labels(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.resize((self.size, self.size), Image.Resampling.NEAREST))


class LibraryPixels:
    """Another library's evaluation transform up to pixels, without its ToTensor and Normalize.

    Args:
        steps: transforms of a `torchvision.transforms.Compose` that ends with these two.
        origin: source of the transform, for errors.
        rgb_first: convert to RGB before the steps, as timm's readers do.
    """

    def __init__(self, steps: Sequence[Any], origin: str, rgb_first: bool = False):
        tail = [type(step).__name__ for step in steps[-2:]]
        if len(tail) < 2 or not tail[0].endswith("ToTensor") or tail[1] != "Normalize":
            raise ConfigError(f"{origin}: its transform ends with {tail}, not with ToTensor and Normalize")
        self._steps, self._normalize, self._rgb_first = list(steps[:-2]), steps[-1], rgb_first

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(float(v) for v in self._normalize.mean)

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(float(v) for v in self._normalize.std)

    def __call__(self, image: Image.Image) -> np.ndarray:
        image = image.convert("RGB") if self._rgb_first else image
        # Apply the library's own steps one by one, so that the input is the same as in its authors' code.
        steps = self._steps
        if (
            self._resize is not None
            and (centre := thin_centre(image, *self._resize, Image.Resampling.BICUBIC)) is not None
        ):
            image, steps = centre, steps[2:]
        for step in steps:
            image = step(image)
        return np.asarray(image.convert("RGB"))

    def labels(self, image: Image.Image) -> np.ndarray:
        """Return a label image of the same part. Raises `ConfigError` if the steps are not a resize and a centre crop."""
        if self._resize is None:
            raise ConfigError(
                "linear_segmentation: masks get the transform of the images, so it must be a bicubic resize and a "
                f"center crop, got the transform {self}. Score another model."
            )
        size, resize = self._resize
        return eval_pixels(image, size, resize, Image.Resampling.NEAREST)

    @cached_property
    def _resize(self) -> tuple[int, int] | None:
        """Return the sizes of the crop and of the shorter side, if the steps begin with a bicubic resize and a centre crop."""
        first, second, *_ = [*self._steps, None, None]
        if type(first).__name__ != "Resize" or type(second).__name__ != "CenterCrop":
            return None
        resize, crop = first.size, second.size
        resize = resize[0] if isinstance(resize, list | tuple) and len(resize) == 1 else resize
        crop = crop[0] if isinstance(crop, list | tuple) and len(set(crop)) == 1 else crop
        bicubic = getattr(first.interpolation, "value", first.interpolation) in ("bicubic", Image.Resampling.BICUBIC)
        return (crop, resize) if isinstance(resize, int) and isinstance(crop, int) and bicubic else None

    def __repr__(self) -> str:
        first = "RGB first" if self._rgb_first else "the file's mode"
        return "; ".join([first, *(" ".join(repr(step).split()) for step in self._steps)])


def as_array(picture: object) -> np.ndarray:
    """Return an array or tensor of pixels as an array. Raises `DataError` for anything else."""
    if isinstance(picture, torch.Tensor):
        # NumPy has no bf16.
        return (picture.float() if picture.dtype == torch.bfloat16 else picture).detach().cpu().numpy()
    if not isinstance(picture, np.ndarray):
        raise DataError(
            f"images: expected paths, PIL images, arrays or tensors, got {type(picture).__name__}. Open a file in memory with PIL.Image.open."
        )
    return picture
