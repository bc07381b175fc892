"""Images of evaluation sets, decoded from files: as training shows them, or for published sets as open_clip does."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import read_bytes
from sparo_train.data.decode.bands import TiffFile, is_tiff
from sparo_train.data.decode.decoding import PUBLISHED, Decoding, decode, decode_own, unscale_labels

# End of the error for an image that cannot be used.
NEEDS_ALL = ". A score needs every image: repair this one or remove it. `sparo data check` names all damaged images."
_PNG = b"\x89PNG\r\n\x1a\n"


def decode_image(data: bytes, where: object, how: Decoding = PUBLISHED, own: bool = False) -> Image.Image:
    """Return the image in these bytes, by default and with `how.bands` in the file's own mode, like open_clip.

    Args:
        data: the file's bytes.
        where: place for errors.
        how: options of the decoder.
        own: decode an image of a user's own set, as in training, instead of using `how`.

    Raises:
        DataError: naming `where`. For a TIFF of bands that only some encoders read, it is raised when the pixels are used.
    """
    scored = NEEDS_ALL if how == PUBLISHED else ""
    if how.bands is not None:
        how = PUBLISHED
    try:
        return decode_own(data) if own else decode(data, how)
    except BadSampleError as bad:
        error = DataError(f"{where}: {bad.full_message()}{scored}")
        if how == PUBLISHED and is_tiff(data):
            return TiffFile(data, error)
        raise error from None


def open_image(path: Path, own: bool = False) -> Image.Image:
    """Return the image in a file, as `decode_image` does. Raises `DataError` naming the file."""
    return decode_image(read_bytes(path, DataError), path, own=own)


def label_image(data: bytes, where: str) -> np.ndarray:
    """Return (H, W) of a PNG with a number per pixel (gray levels, or the indices of a palette). Raises `DataError` naming `where`."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            table = np.asarray(image)
    except (OSError, ValueError, SyntaxError) as error:
        if data.startswith(_PNG):
            raise DataError(f"{where}: cannot be read ({error}). Write it again.") from None
        raise DataError(f"{where}: is not a PNG file. Save it as PNG, because JPEG changes the numbers.") from None
    if table.ndim != 2:
        raise DataError(
            f"{where}: must have one number per pixel, got {table.shape[2]} channels. Convert colours to class numbers."
        )
    return unscale_labels(table, data)
