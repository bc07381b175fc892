"""Transforms of images to uint8 pixels. Random numbers come from the sample's own generator, never from a global one.

A picture is an image of Pillow, or an array. The class decides which library resizes it: Pillow exactly as it always
did, or torch about six times as fast. Their values differ by at most two levels: in 0.3 % of the values if the picture
becomes smaller, in up to a quarter if it becomes larger.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

cv2.setNumThreads(0)  # OpenCV's thread pool does not survive the fork of a loader worker

Picture = Image.Image | np.ndarray  # an array has the shape (H, W, 3) and uint8 values

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


def get_size(picture: Picture) -> tuple[int, int]:
    """Return width and height."""
    return (picture.shape[1], picture.shape[0]) if isinstance(picture, np.ndarray) else picture.size


def flip(pixels: np.ndarray) -> np.ndarray:
    """Flip (H, W, 3) left to right."""
    return cv2.flip(pixels, 1)


def planes(pixels: np.ndarray) -> np.ndarray:
    """Return (3, H, W) of (H, W, 3)."""
    out = np.empty((3, *pixels.shape[:2]), np.uint8)
    cv2.split(pixels, [out[0], out[1], out[2]])  # 20 times as fast as a transposed copy
    return out


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (…, 3, H, W) uint8 as floats, with the arithmetic of torchvision's ToTensor and Normalize.

    Args:
        pixels: on any device.
        mean, std: (3, 1, 1) in the range from 0 to 1.
    """
    # In place, because new memory for every operation takes more time than the arithmetic.
    values = pixels.to(torch.promote_types(torch.float32, mean.dtype), copy=True)
    return values.div_(255).sub_(mean).div_(std)


def train_pixels(
    picture: Picture, size: int, scale: tuple[float, float], hflip: float, rng: np.random.Generator
) -> np.ndarray:
    """Apply RandomResizedCrop (bicubic, antialiased) and a flip with probability `hflip`; return (size, size, 3) uint8."""
    box = random_resized_crop_box(get_size(picture), scale, rng)
    # Draw no number if nothing flips, so that later numbers do not depend on an inactive option.
    flips = hflip > 0 and rng.random() < hflip
    pixels = resized_crop(picture, box, size)
    return flip(pixels) if flips else pixels


def eval_pixels(
    picture: Picture, size: int, resize: int | None = None, filter: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """Resize the shortest side to `resize` (bicubic; default: `size`, as in open_clip), then crop the centre; return (size, size, 3) uint8."""
    if isinstance(picture, Image.Image):
        return np.asarray(centre(picture, size, resize, filter))
    width, height = _size_with_shortest_side(get_size(picture), resize or size)
    if width * height > _MAX_PIXELS and picture.shape[2] != 3:
        bands = (
            centre(Image.fromarray(np.ascontiguousarray(band)), size, resize, filter)
            for band in np.moveaxis(picture, -1, 0)
        )
        return np.stack([np.asarray(band) for band in bands], -1)
    if width * height > _MAX_PIXELS:
        return np.asarray(centre(Image.fromarray(picture), size, resize, filter))
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _torch_resize(picture, (width, height), filter)[top : top + size, left : left + size]


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
    if min(image.size) == to:
        return image
    return image.resize(_size_with_shortest_side(image.size, to), filter)


def _size_with_shortest_side(size: tuple[int, int], to: int) -> tuple[int, int]:
    width, height = size
    # Rounded down as in torchvision, because one pixel shifts the centre crop.
    other = int(to * max(size) / min(size))
    return (to, other) if width <= height else (other, to)


def resized_crop(
    picture: Picture, box: Crop, size: int, filter: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """Crop, then resize to (size, size) with one of Pillow's antialiased filters; return (size, size, 3) uint8."""
    if isinstance(picture, np.ndarray):
        cropped = picture[box.top : box.top + box.height, box.left : box.left + box.width]
        return _torch_resize(cropped, (size, size), filter)
    cropped = picture.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    # A crop that has the size already is used as it is, because resizing would only copy it.
    if cropped.size != (size, size):
        cropped = cropped.resize((size, size), filter)
    return np.asarray(cropped)


_TORCH_FILTERS = {Image.Resampling.BICUBIC: "bicubic", Image.Resampling.BILINEAR: "bilinear"}


def _torch_resize(pixels: np.ndarray, size: tuple[int, int], filter: Image.Resampling) -> np.ndarray:
    """Resize (H, W, 3) to `size` (width, height) with torch's antialiased filter for uint8."""
    width, height = size
    if pixels.shape[:2] == (height, width):
        return pixels
    # The batch axis is added before the axes are permuted, because torch's fast kernel is for strides of channels_last.
    batch = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    out = interpolate(batch, (height, width), mode=_TORCH_FILTERS[filter], antialias=True)
    return out.permute(0, 2, 3, 1).numpy()[0]
