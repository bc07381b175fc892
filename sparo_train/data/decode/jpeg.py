"""JPEG files decoded by libjpeg-turbo without Pillow's image objects. At full size, pixels are equal to Pillow's."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from PIL import Image

_COLOURS = ("YCbCr", "RGB", "Gray")
_ORIENTATION = 0x0112
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_WITHOUT_LENGTH = (0x00, 0x01, *range(0xD0, 0xDA))  # markers without content


def decode_jpeg(data: bytes, upright: bool = True, rgb: bool = True, shrink_to: int | None = None) -> np.ndarray | None:
    """Return the pixels (H, W, 3) uint8 of a colour or gray JPEG; None if Pillow must decode the file.

    The result is None for other formats, CMYK, damaged files, images with too many pixels, and images that must be
    rotated: there is one rule for each of them, in `decoding.py`.

    Args:
        data: the file.
        upright: return None for images that must be rotated.
        rgb: if False, gray images are (H, W).
        shrink_to: allow scales of 1/2, 3/8, 1/4 or 1/8 that leave at least this many pixels on both sides.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    smallest = shrink_to or 0
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        pixels, limit = int(height) * int(width), Image.MAX_IMAGE_PIXELS
        if colours not in _COLOURS or (limit is not None and pixels > limit):
            return None
        if upright and _is_rotated(data):
            return None
        space = "RGB" if rgb or colours != "Gray" else "GRAY"
        # Scales above 1/2 are slower than decoding at full size.
        image = simplejpeg.decode_jpeg(data, space, min_height=smallest, min_width=smallest, min_factor=2)
        return image[..., 0] if space == "GRAY" else image
    except Exception:  # also warnings that Pillow ignores, such as bytes between segments
        return None


def _is_rotated(data: bytes) -> bool:
    """Return whether an orientation other than upright is stored, in EXIF or XMP."""
    at = 2
    while data[at : at + 1] == b"\xff" and at + 4 <= len(data):
        marker = data[at + 1]
        if marker == _START_OF_SCAN:
            return False
        if marker == 0xFF:  # segments may be padded with 0xFF
            at += 1
            continue
        if marker == _APP1 or marker in _WITHOUT_LENGTH:
            break  # EXIF or XMP, which Pillow parses
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return Image.open(io.BytesIO(data), formats=("JPEG",)).getexif().get(_ORIENTATION, 1) not in (0, 1)
