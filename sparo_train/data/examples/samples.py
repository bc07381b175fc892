"""One sample's bytes to pixels and caption; what is wrong with a bad one is a short reason, counted by the loader."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageFile

from ...core.errors import BadSampleError
from ..read.sources import SourceConfig

# PIL goes by content, not by name, and starts Ghostscript for an EPS; what data sets of images have is this.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


MOST_LETTERS, MOST_CHARACTERS = 400, 100_000  # of a word, within which byte pairs are merged; of a caption


def image_bytes(fields: Mapping[str, bytes], keys: Sequence[str]) -> bytes:
    """The image member. Raises `BadSampleError('missing image')`."""
    for key in keys:
        if key in fields:
            return fields[key]
    raise BadSampleError("missing image")


def decode_image(data: bytes, shrink_to: int | None = None) -> Image.Image:
    """Decode to RGB. `shrink_to` lets a JPEG be decoded at 1/2, 1/4 or 1/8, not below that many pixels (pixels differ).

    Raises:
        BadSampleError: damaged, truncated, or absurdly large.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if shrink_to is not None:
                image.draft("RGB", (shrink_to, shrink_to))
            if image.mode.startswith("I"):  # 16 bits a pixel, which PIL's conversion would clip to white
                image = Image.fromarray((np.asarray(image, dtype=np.uint32) >> 8).astype(np.uint8))
            return image.convert("RGB")
    except Exception:  # PIL picks a decoder by content, and decoders fail in their own ways
        raise BadSampleError("bad image") from None


def caption(fields: Mapping[str, bytes], config: SourceConfig) -> str:
    """The caption: member `caption_key`, or `json:NAME` for a field of the sample's json.

    Raises:
        BadSampleError: no such member, not UTF-8, or nothing but white space.
    """
    member, _, field = config.caption_key.partition(":")
    if member not in fields:
        raise BadSampleError("missing caption")
    try:
        text = fields[member].decode("utf-8")
        if field:
            text = json.loads(text)[field]
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise BadSampleError("bad text") from None
    except (KeyError, TypeError):
        raise BadSampleError("missing caption") from None
    if not isinstance(text, str) or not text.strip():
        raise BadSampleError("missing caption")
    return text.strip()


ImageFile.LOAD_TRUNCATED_IMAGES = False  # a truncated file is a bad image, not a grey one
