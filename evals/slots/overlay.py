"""Attention drawn over an image as it was, not as it was cut: the patches lie where the model saw them."""

from __future__ import annotations

import io
from typing import NamedTuple

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor

from ..encoders.encoder import Encoder
from ..encoders.pixels import Pixels, SquarePixels


class Seen(NamedTuple):
    """What a model saw of an image: `image` to draw on, and in its pixels the box (left, top, right, bottom) that was looked at."""

    image: Image.Image
    box: tuple[float, float, float, float]


def seen(encoder: Encoder, image: Image.Image) -> Seen:
    """The whole image and the part that was cut out of it; of a transform that is not ours the part alone."""
    transform = encoder.transform
    if isinstance(transform, SquarePixels):
        return Seen(image, (0, 0, image.width, image.height))
    if isinstance(transform, Pixels):
        # As `eval_pixels` cuts: the middle, `size` of the `resize` pixels that the shortest side becomes.
        side = min(image.size) * transform.size / transform.resize
        left, top = (image.width - side) / 2, (image.height - side) / 2
        return Seen(image, (left, top, left + side, top + side))
    part = Image.fromarray(np.asarray(transform(image)))
    return Seen(part, (0, 0, part.width, part.height))


def overlay(what: Seen, heat: Tensor, brightest: float, size: int = 160) -> Image.Image:
    """The image in grey under its attention (g, g), black where the model did not look; its longest side has `size` pixels.

    Args:
        brightest: the attention that has the brightest colour.
    """
    scale = size / max(what.image.size)
    shape = _scaled(what.image.size, scale)
    grey = np.asarray(what.image.convert("L").resize(shape, Image.Resampling.BICUBIC), np.float32) / 255
    left, top, right, bottom = (round(v * scale) for v in what.box)
    left, top = max(0, left), max(0, top)
    right, bottom = min(shape[0], max(right, left + 1)), min(shape[1], max(bottom, top + 1))
    level = Image.fromarray((heat / max(brightest, 1e-12)).clamp(0, 1).numpy().astype(np.float32))
    level = np.asarray(level.resize((right - left, bottom - top), Image.Resampling.BILINEAR))
    colour = matplotlib.colormaps["inferno"](level)[..., :3]
    out = np.repeat(grey[..., None], 3, axis=2) * 0.25
    inside = grey[top:bottom, left:right, None]
    out[top:bottom, left:right] = 0.4 * inside + 0.6 * colour
    return Image.fromarray((255 * out.clip(0, 1)).astype(np.uint8))


def thumbnail(what: Seen, size: int = 160) -> Image.Image:
    """The image itself, at the size of its overlays."""
    scale = size / max(what.image.size)
    return what.image.convert("RGB").resize(_scaled(what.image.size, scale))


def _scaled(size: tuple[int, int], by: float) -> tuple[int, int]:
    return max(1, round(size[0] * by)), max(1, round(size[1] * by))


def jpeg(image: Image.Image) -> bytes:
    """Encoded for a page."""
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=85)
    return out.getvalue()
