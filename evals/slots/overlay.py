"""Attention drawn on the original image, with patches at the positions where the model saw them."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy import ndimage
from torch import Tensor

from sparo_train.data.decode.decoding import display_image

from ..encoders.encoder import Encoder
from ..encoders.pixels import BandPixels, MappedPixels, Pixels, SquarePixels


class ImageCrop(NamedTuple):
    """Image to draw on, and the box (left, top, right, bottom) in its pixels that the model saw."""

    image: Image.Image
    box: tuple[float, float, float, float]


def image_crop(encoder: Encoder, image: Image.Image) -> ImageCrop:
    """Return the whole image and the crop's box; for a foreign transform, the crop only."""
    transform = encoder.transform
    if isinstance(transform, MappedPixels | BandPixels):
        image = display_image(image, encoder.decoding)
    if isinstance(transform, SquarePixels):
        return ImageCrop(image, (0, 0, image.width, image.height))
    if isinstance(transform, Pixels):
        # Like `eval_pixels`: the centre, `size` of the `resize` pixels of the shorter side.
        side = min(image.size) * transform.size / transform.resize
        left, top = (image.width - side) / 2, (image.height - side) / 2
        return ImageCrop(image, (left, top, left + side, top + side))
    part = Image.fromarray(np.asarray(transform(image)))
    return ImageCrop(part, (0, 0, part.width, part.height))


# The page of the explorer draws the same (launch/explorer/page/heat.js).
_DIMMED, _LIFT = 0.4, 0.08  # brightness of unattended pixels: grey * _DIMMED + _LIFT
_OUTSIDE = 0.15  # brightness outside of the model's crop
_SMALLEST_PART = 0.05  # of the pixels that a line encloses


def overlay(what: ImageCrop, heat: Tensor, brightest: float, size: int = 160) -> Image.Image:
    """Draw attention (g, g): attended pixels keep their colours, others become grey and dim, and a line encloses half of the attention.

    Args:
        what: the image.
        heat: its attention.
        brightest: attention at which colours remain completely.
        size: pixels of the longer side.
    """
    picture, level, looked = _laid(what, heat, brightest, size)
    grey = np.repeat((picture @ np.asarray([0.299, 0.587, 0.114], np.float32))[..., None], 3, axis=-1)
    share = np.sqrt(level)[..., None]  # makes weaker maxima visible next to the strongest
    out = share * picture + (1 - share) * (_DIMMED * grey + _LIFT)
    out[contour(level, looked)] = 1
    return _image(np.where(looked[..., None], out, _OUTSIDE * grey))


def contour(level: np.ndarray, looked: np.ndarray) -> np.ndarray:
    """Return the mask (H, W) of the border pixels of the smallest region of `looked` with half of the attention.

    Parts with less than 5 % of the region's pixels are left out. The mask is empty if the region covers more than a quarter.
    """
    falling = np.sort(level[looked])[::-1]
    total = falling.sum(dtype=np.float64)
    if total <= 0:
        return np.zeros(level.shape, bool)
    inside = looked & (level >= falling[np.searchsorted(falling.cumsum(dtype=np.float64), total / 2)])
    if inside.sum() > looked.sum() / 4:
        return np.zeros(level.shape, bool)
    parts = np.zeros(inside.shape, np.int32)
    ndimage.label(inside, output=parts)
    sizes = np.bincount(parts.ravel())
    inside &= sizes[parts] >= _SMALLEST_PART * inside.sum()
    around = np.pad(inside, 1, constant_values=True)
    return inside & ~(around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:])


def _laid(what: ImageCrop, heat: Tensor, brightest: float, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return at one size: the image (H, W, 3) in 0..1, its attention (H, W) in 0..1, and the mask of the crop."""
    scale = size / max(what.image.size)
    shape = _scale(what.image.size, scale)
    picture = np.asarray(resize_for_page(what.image.convert("RGB"), shape), np.float32) / 255
    left, top, right, bottom = (round(v * scale) for v in what.box)
    left, top = max(0, left), max(0, top)
    right, bottom = min(shape[0], max(right, left + 1)), min(shape[1], max(bottom, top + 1))
    inside = Image.fromarray((heat / max(brightest, 1e-12)).clamp(0, 1).numpy().astype(np.float32))
    level, looked = np.zeros(picture.shape[:2], np.float32), np.zeros(picture.shape[:2], bool)
    level[top:bottom, left:right] = np.asarray(inside.resize((right - left, bottom - top), Image.Resampling.BILINEAR))
    looked[top:bottom, left:right] = True
    return picture, level, looked


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))


def thumbnail(what: ImageCrop, size: int = 160) -> Image.Image:
    """Return the image itself, at the size of its overlays."""
    scale = size / max(what.image.size)
    return resize_for_page(what.image.convert("RGB"), _scale(what.image.size, scale))


def resize_for_page(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image for a page. Small images are enlarged with sharp pixels, because the model gets no others."""
    how = Image.Resampling.NEAREST if size[0] > image.width else Image.Resampling.BICUBIC
    return image.resize(size, how)


def _scale(size: tuple[int, int], by: float) -> tuple[int, int]:
    return max(1, round(size[0] * by)), max(1, round(size[1] * by))


def jpeg(image: Image.Image) -> bytes:
    """Encode an image for a page."""
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=85)
    return out.getvalue()
