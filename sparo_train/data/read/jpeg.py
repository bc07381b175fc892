"""JPEG files decoded by libjpeg-turbo without Pillow's image objects. The pixels are equal to Pillow's."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from PIL import Image

_COLOURS = ("YCbCr", "RGB", "Gray")
_ORIENTATION = 0x0112
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_WITHOUT_LENGTH = (0x00, 0x01, *range(0xD0, 0xDA))  # markers without a segment


def decode_jpeg(data: bytes, upright: bool = True, rgb: bool = True, shrink_to: int | None = None) -> np.ndarray | None:
    """Return the pixels (H, W, 3) uint8 of a colour or gray JPEG; None if Pillow must decode the file.

    Pillow decodes other formats, CMYK, damaged files, images with too many pixels, and images that must be rotated, so
    that the rules for them are in one place.

    Args:
        data: the file.
        upright: whether the EXIF orientation matters.
        rgb: False: return a gray image as (H, W).
        shrink_to: allow decoding at 1/2, 3/8, 1/4 or 1/8, with at least this many pixels per side.
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
        # Scales above one half take longer than decoding everything.
        image = simplejpeg.decode_jpeg(data, space, min_height=smallest, min_width=smallest, min_factor=2)
        return image[..., 0] if space == "GRAY" else image
    except Exception:  # also for warnings, such as bytes between two segments, which Pillow ignores
        return None


def _is_rotated(data: bytes) -> bool:
    """Return whether an orientation other than upright is stored, in EXIF or XMP."""
    at = 2
    while data[at : at + 1] == b"\xff" and at + 4 <= len(data):
        marker = data[at + 1]
        if marker == _START_OF_SCAN:
            return False
        if marker == 0xFF:  # bytes between segments may be filled with it
            at += 1
            continue
        if marker == _APP1 or marker in _WITHOUT_LENGTH:
            break
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return Image.open(io.BytesIO(data), formats=("JPEG",)).getexif().get(_ORIENTATION, 1) not in (0, 1)
