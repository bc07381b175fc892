"""Attention drawn on the original image, with patches at the positions where the model saw them."""

from __future__ import annotations

import io
from typing import NamedTuple

import matplotlib
import numpy as np
from PIL import Image
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


def overlay(what: ImageCrop, heat: Tensor, brightest: float, size: int = 160) -> Image.Image:
    """Draw attention (g, g) over the grey image, black outside the crop; its longer side has `size` pixels.

    Args:
        what, heat: the image and its attention.
        brightest: attention that gets the brightest colour.
        size: pixels of the longer side.
    """
    picture, level, looked = _laid(what, heat, brightest, size)
    grey = picture @ np.asarray([0.299, 0.587, 0.114], np.float32)
    colour = matplotlib.colormaps["inferno"](level)[..., :3]
    out = np.where(looked[..., None], 0.4 * grey[..., None] + 0.6 * colour, 0.25 * grey[..., None])
    return _image(out)


def spotlight(what: ImageCrop, heat: Tensor, brightest: float, size: int = 160) -> Image.Image:
    """Draw the image in colour where the slot attends, and fade it to white elsewhere; otherwise like `overlay`."""
    picture, level, _ = _laid(what, heat, brightest, size)
    return _image(picture * level[..., None] + (0.25 * picture + 0.75) * (1 - level[..., None]))


def _laid(what: ImageCrop, heat: Tensor, brightest: float, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return at one size: the image (H, W, 3) in 0..1, its attention (H, W) in 0..1, and the mask of the crop."""
    scale = size / max(what.image.size)
    shape = _scaled(what.image.size, scale)
    picture = np.asarray(what.image.convert("RGB").resize(shape, Image.Resampling.BICUBIC), np.float32) / 255
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
    return what.image.convert("RGB").resize(_scaled(what.image.size, scale))


def _scaled(size: tuple[int, int], by: float) -> tuple[int, int]:
    return max(1, round(size[0] * by)), max(1, round(size[1] * by))


def jpeg(image: Image.Image) -> bytes:
    """Encode an image for a page."""
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=85)
    return out.getvalue()
