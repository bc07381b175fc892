"""Transforms of images to uint8 pixels. Random numbers come from the sample's own generator, never from a global one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from PIL import Image

_MAX_PIXELS = 1 << 26  # pixels of the whole resized image; above this, only the lines of the crop are computed
_BITS = 22  # precision of Pillow's fixed-point coefficients for 8-bit pixels


# Centre crop of very long, thin images, which Pillow would resize as a whole (a 1 x 12,000 image at 224 pixels takes
# 2.4 GiB).
def thin_centre(image: Image.Image, size: int, resize: int, filter: Image.Resampling) -> Image.Image | None:
    """Return `transforms.centre` of an image that would be enlarged to more than 64 million pixels, with the same pixels; None for others.

    Pillow resizes columns, then rows. The pass along the short side is Pillow's own. Along the long side, only the
    lines of the crop are computed, with Pillow's arithmetic. Modes other than RGB and L are converted to RGB first.
    """
    width, height = image.size
    short, long = min(width, height), max(width, height)
    other = int(resize * long / short)
    if resize <= short or resize * other <= _MAX_PIXELS:
        return None
    first = round((other - size) / 2)
    if filter != Image.Resampling.BICUBIC:  # label maps: nearest neighbours only need the source lines of the crop
        lines = ((first + np.arange(size) + 0.5) * long / other).astype(np.int64).clip(0, long - 1)
        values = np.asarray(image)
        values = values[lines] if height >= width else values[:, lines]
        image = Image.fromarray(np.ascontiguousarray(values))
        image = image.resize((resize, size) if height >= width else (size, resize), filter)
    elif height >= width:
        columns = np.asarray(_plain(image).resize((resize, height), filter))
        image = Image.fromarray(_lines(columns, other, first, size))
    else:
        rows = _lines(np.asarray(_plain(image)).swapaxes(0, 1), other, first, size).swapaxes(0, 1)
        image = Image.fromarray(np.ascontiguousarray(rows)).resize((size, resize), filter)
    start = round((resize - size) / 2)
    box = (start, 0, start + size, size) if height >= width else (0, start, size, start + size)
    return image.crop(box)


def _plain(image: Image.Image) -> Image.Image:
    return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _lines(values: np.ndarray, out: int, first: int, count: int) -> np.ndarray:
    """Return lines `first` to `first + count` of `values` (N, …) uint8 enlarged to `out` lines by Pillow's bicubic filter."""
    total = len(values)
    scale = total / out
    lines = np.empty((count, *values.shape[1:]), np.uint8)
    for i in range(count):
        middle = (first + i + 0.5) * scale
        low, high = max(0, int(middle - 1.5)), min(total, int(middle + 2.5))
        weights = _bicubic(np.arange(low, high) - middle + 0.5)
        norm = 0.0
        for weight in weights:  # one by one, because another order of summation would round differently from Pillow
            norm += weight
        weights = weights / norm * (1 << _BITS)
        fixed = np.trunc(np.where(weights < 0, -0.5, 0.5) + weights).astype(np.int64)
        exact = (1 << (_BITS - 1)) + np.tensordot(fixed, values[low:high].astype(np.int64), 1)
        lines[i] = (exact >> _BITS).clip(0, 255)
    return lines


def _bicubic(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    x = np.abs(x)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


class Crop(NamedTuple):
    """Crop box: left and top, width, height, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_resized_crop_box(
    size: tuple[int, int],
    scale: tuple[float, float],
    rng: np.random.Generator,
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Crop:
    """Return the box of torchvision's RandomResizedCrop for an image of `size` (width, height): ten tries, then the middle."""
    width, height = size
    # torchvision's order of random numbers and its rounding, with the sample's own generator.
    area = width * height
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        target = area * rng.uniform(scale[0], scale[1])
        aspect = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Crop(int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1)), w, h)
    # Ten tries only fail for long images: use the middle, as near to a square as the ratio allows.
    aspect = width / height
    w = round(height * ratio[1]) if aspect > ratio[1] else width
    h = round(width / ratio[0]) if aspect < ratio[0] else height
    return Crop((width - w) // 2, (height - h) // 2, w, h)


def train_pixels(
    image: Image.Image, size: int, scale: tuple[float, float], hflip: float, rng: np.random.Generator
) -> np.ndarray:
    """Apply RandomResizedCrop (bicubic, antialiased) and a flip with probability `hflip`; return (size, size, 3) uint8."""
    box = random_resized_crop_box(image.size, scale, rng)
    # Draw no number if nothing flips, so that later numbers do not depend on an inactive option.
    flip = hflip > 0 and rng.random() < hflip
    pixels = resized_crop(image, box, size)
    # torch does not support views with negative strides.
    return np.ascontiguousarray(pixels[:, ::-1]) if flip else pixels


def eval_pixels(
    image: Image.Image, size: int, resize: int | None = None, filter: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """Resize the shortest side to `resize` (bicubic; default: `size`, as in open_clip), then crop the centre; return (size, size, 3) uint8."""
    return np.asarray(centre(image, size, resize, filter))


def centre(
    image: Image.Image, size: int, resize: int | None = None, filter: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    """Return `eval_pixels` as an image, in the mode of `image`."""
    if (short := thin_centre(image, size, resize or size, filter)) is not None:
        return short
    image = shortest_side(image, resize or size, filter)
    width, height = image.size
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def shortest_side(image: Image.Image, to: int, filter: Image.Resampling = Image.Resampling.BICUBIC) -> Image.Image:
    """Resize (bicubic, antialiased) so that the shortest side has `to` pixels; the other one is rounded down, as in torchvision."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    if short == to:
        return image
    # Rounded down as in torchvision, because one pixel shifts the centre crop.
    other = int(to * long / short)
    return image.resize((to, other) if width <= height else (other, to), filter)


def resized_crop(
    image: Image.Image, box: Crop, size: int, filter: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """Crop, then resize to (size, size) with one of PIL's antialiased filters; return (size, size, 3) uint8."""
    cropped = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    # A crop that has the size already is used as it is, because resizing would only copy it.
    if cropped.size != (size, size):
        cropped = cropped.resize((size, size), filter)
    return np.asarray(cropped)
