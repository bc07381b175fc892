"""The centre crop of very long, thin images: Pillow would resize them whole (a 1 x 12,000 image at 224 pixels takes 2.4 GiB)."""

from __future__ import annotations

import numpy as np
from PIL import Image

_MAX_PIXELS = 1 << 26  # pixels of the whole resized image, above which only the lines of the crop are computed
_BITS = 22  # of Pillow's fixed-point coefficients for 8-bit pixels


def thin_centre(image: Image.Image, size: int, resize: int, filter: Image.Resampling) -> Image.Image | None:
    """Return `transforms.centre` of an image that is enlarged to more than 64 million pixels, with the same pixels; None for any other.

    Pillow resizes columns, then rows. The pass along the short side is its own; along the long side, only the lines of the crop are
    computed, in its arithmetic. Modes other than RGB and L are converted to RGB first.
    """
    width, height = image.size
    short, long = min(width, height), max(width, height)
    other = int(resize * long / short)
    if resize <= short or resize * other <= _MAX_PIXELS:
        return None
    first = round((other - size) / 2)
    if filter != Image.Resampling.BICUBIC:  # label maps: nearest neighbours need the source lines of the crop alone
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
    """Return lines `first` to `first + count` of `values` (N, …) uint8 resized to `out` lines by Pillow's bicubic filter, enlarging."""
    total = len(values)
    scale = total / out
    lines = np.empty((count, *values.shape[1:]), np.uint8)
    for i in range(count):
        middle = (first + i + 0.5) * scale
        low, high = max(0, int(middle - 1.5)), min(total, int(middle + 2.5))
        weights = _bicubic(np.arange(low, high) - middle + 0.5)
        norm = 0.0
        for weight in weights:  # one by one, as Pillow adds them: another order would round otherwise
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
