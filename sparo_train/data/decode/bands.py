"""Chosen bands of images with any number of them: multispectral TIFF files, channels of a microscope, gray images."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import cv2
import numpy as np
from PIL import Image
from pydantic import AfterValidator, Field

from ...core.errors import BadSampleError, ConfigError

MAX_BANDS = 512  # OpenCV's limit
_MAX_BYTES = 1 << 32  # of a decoded file with all its bands
_NODATA, _MINISWHITE, _PALETTE = 42113, 0, 3  # a tag, and values of the tag for colours
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: files above 4 GiB


def _rising(value: Any) -> Any:
    if len(value) == 0:
        raise ValueError("expected [low, high], or one pair [low, high] for each band, got an empty list")
    pairs = () if isinstance(value, str) else (value,) if not isinstance(value[0], tuple) else value
    if not all(low < high for low, high in pairs):
        raise ValueError("expected [low, high] with low < high")
    return value


# The last form has a pair for each of `data.bands`.
PixelRange = Annotated[
    Literal["by_type", "percentiles"] | tuple[float, float] | tuple[tuple[float, float], ...],
    AfterValidator(_rising),
]
Bands = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=MAX_BANDS)]


def check_bands(bands: Sequence[int] | None, how: PixelRange, decode: str = "fast", scaled: bool = False) -> None:
    """Raise `ValueError` if keys of a `data` block cannot be combined."""
    ranges = () if isinstance(how, str) or not isinstance(how[0], tuple) else how
    named = len(bands or ())
    if ranges and len(ranges) != named:
        bands_text = f"bands names {named} bands" if named else "bands is not set"
        raise ValueError(f"pixel_range: has {len(ranges)} ranges, but {bands_text}. Give one range, or one per band.")
    if bands is not None and decode == "exact":
        raise ValueError(
            "decode=exact: resizes with Pillow, which does not support a selection of bands. Set decode=fast, or "
            "remove bands."
        )
    if bands is not None and scaled:
        raise ValueError(
            "scaled_decoding=true: applies only to JPEG files read as RGB, not to selected bands. Remove scaled_decoding or bands."
        )


class TiffFile(Image.Image):
    """A TIFF that Pillow cannot read, in place of an image: encoders with `data.bands` read its bytes; other uses of its pixels raise `error`."""

    def __init__(self, data: bytes, error: Exception):
        super().__init__()
        self.data, self.error = data, error
        self._mode, self._size = "L", _tiff_size(data)

    def load(self) -> Any:
        raise self.error


def is_tiff(data: bytes) -> bool:
    """Return whether a file is a TIFF, by its first bytes."""
    return data[:4] in _TIFF


def tiff_values(data: bytes) -> np.ndarray:
    """Decode a TIFF to (H, W, C) in its own dtype; planes of one image and pages of one size count as bands.

    Raises:
        BadSampleError: damaged, too large, or with more than three dimensions.
        ConfigError: tifffile is not installed.
    """
    tifffile = tifffile_module()
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            series = file.series[0]
            axes, shape = series.axes, series.shape
            others = [axis for axis in axes if axis not in "YX"]
            if not {"X", "Y"} <= set(axes) or len(others) > 1:
                raise BadSampleError("bad image", detail=f"axes {axes} of {shape}; expected rows, columns and bands")
            _refuse_size(shape[axes.index("X")] * shape[axes.index("Y")], series.nbytes)
            values = series.asarray()
            photometric = int(file.pages[0].photometric)
    except BadSampleError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise BadSampleError("bad image", detail=str(error).partition("\n")[0][:120]) from None
    if values.size == 0 or values.shape != shape:
        raise BadSampleError("bad image", detail=f"shape {values.shape}")
    if photometric == _PALETTE:
        raise BadSampleError(
            "bad image", detail="a TIFF with a palette. Convert it to colours, or to a value per pixel."
        )
    if photometric == _MINISWHITE and values.dtype in (np.uint8, np.uint16):
        values = np.iinfo(values.dtype).max - values
    order = [axes.index("Y"), axes.index("X"), *(axes.index(axis) for axis in others)]
    return values.transpose(order).reshape(*(shape[i] for i in order[:2]), -1)


def _tiff_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a TIFF, (1, 1) if they cannot be found."""
    try:
        with tifffile_module().TiffFile(io.BytesIO(data)) as file:
            page = file.pages[0]
            return int(page.imagewidth), int(page.imagelength)
    except Exception:  # damaged, which `error` reports; or tifffile is missing, which encoders with data.bands report
        return 1, 1


def tiff_nodata(data: bytes) -> float | None:
    """Return the value that marks pixels without data in a TIFF (GDAL's tag), if there is one."""
    try:
        with tifffile_module().TiffFile(io.BytesIO(data)) as file:
            return float(str(file.pages[0].tags[_NODATA].value).strip("\0 "))
    except Exception:  # no such tag, or no number in it; a damaged file was refused when it was decoded
        return None


def tifffile_module() -> Any:
    """Return the module tifffile. Raises `ConfigError` if it is not installed."""
    try:
        import tifffile
    except ImportError:
        raise ConfigError("data.bands: needs tifffile. pip install -e '.[bands]' in sparo's checkout") from None
    # It logs each oddity of a damaged file, which becomes one error here.
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    return tifffile


def image_values(image: Image.Image, file: bytes | None) -> np.ndarray:
    """Return the channels (H, W, C) of an image in its own mode; `file` are the encoded bytes if Pillow reduces 16 bits to eight."""
    if file is not None:
        values = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
        if values is None or values.ndim != 3 or values.shape[2] < 3:
            raise BadSampleError("bad image", detail="its 16-bit channels cannot be decoded")
        return values[..., [0, 3] if image.mode == "LA" and values.shape[2] == 4 else [2, 1, 0, 3][: values.shape[2]]]
    if image.mode not in ("L", "LA", "RGB", "RGBA", "I;16", "I;16B", "I;16L", "I", "F"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    values = np.asarray(image)
    return values[..., None] if values.ndim == 2 else values


def select(values: np.ndarray, bands: Sequence[int], how: PixelRange) -> np.ndarray:
    """Return bands (H, W, len(bands)) uint8 of (H, W, C). Raises `BadSampleError` for a missing band and unmapped values."""
    if max(bands) > values.shape[2]:
        raise BadSampleError(
            "missing band", detail=f"band {max(bands)} of {values.shape[2]}. Change data.bands, or remove the file."
        )
    chosen = values if [*bands] == [*range(1, values.shape[2] + 1)] else values[..., [band - 1 for band in bands]]
    if chosen.dtype == np.bool_:
        chosen = chosen.astype(np.uint8) * np.uint8(255)
    if chosen.dtype.kind not in "uif":
        raise BadSampleError("bad image", detail=f"dtype {chosen.dtype}; expected integers or floats")
    if chosen.dtype != np.uint8:
        chosen = to_uint8(chosen, how, chosen.dtype.kind == "f", per_band=True)
    return np.ascontiguousarray(chosen)


def to_uint8(values: np.ndarray[Any, Any], how: PixelRange, real: bool, per_band: bool = False) -> np.ndarray:
    """Map values to uint8.

    Args:
        values: integers or floats.
        how: `data.pixel_range`.
        real: they are floats, which by_type expects from 0 to 1.
        per_band: the last dimension has bands, with percentiles of their own; values that are not finite become 0.

    Raises:
        BadSampleError: values outside of the range of by_type, or without `per_band` values that are not finite.
    """
    if per_band and real:
        missing = ~np.isfinite(values)
        values = np.where(missing, np.nan, values)
        if missing.all():
            return np.zeros(values.shape, np.uint8)
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if per_band else (np.min(values), np.max(values))
    if how == "by_type":
        expected_range = (0.0, 1.0) if real else (0.0, 65535.0)
        if not expected_range[0] <= low <= high <= expected_range[1]:  # also for values that are not finite
            kind = "float pixels" if real else f"{8 * values.dtype.itemsize}-bit pixels"
            raise BadSampleError(
                "pixel range",
                detail=f"{kind} from {low:g} to {high:g}, expected {expected_range[0]:g} to {expected_range[1]:g}. Set data.pixel_range.",
            )
        return (
            np.rint(np.nan_to_num(values) * 255).astype(np.uint8)
            if real
            else (values.astype(np.uint32) >> 8).astype(np.uint8)
        )
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadSampleError("pixel range", detail="pixels that are not finite")
    lows, highs = _range(values, how, per_band)
    span = np.where(highs > lows, highs - lows, np.inf)  # a constant image becomes 0
    mapped = (values.astype(np.float64) - lows) / span * 255
    return np.rint(np.nan_to_num(mapped, nan=0.0)).clip(0, 255).astype(np.uint8)


def _range(values: np.ndarray, how: PixelRange, per_band: bool) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(how, str):
        return np.nanpercentile(values, (1, 99), axis=(0, 1)) if per_band else np.percentile(values, (1, 99))  # type: ignore[return-value]
    pairs = np.asarray(how, np.float64)
    return pairs[..., 0], pairs[..., 1]


def _refuse_size(pixels: int, size: int) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if (limit is not None and pixels > limit) or size > _MAX_BYTES:
        raise BadSampleError(
            "too many pixels",
            detail=f"{pixels / 1e6:.0f} million, {size / 1e9:.1f} GB; limits {(limit or 0) / 1e6:.0f} million and {_MAX_BYTES / 1e9:.1f} GB",
        )


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return (..., 3) for display: the first three of the bands (..., C); the first as gray if there are fewer."""
    return pixels[..., :3] if pixels.shape[-1] >= 3 else np.repeat(pixels[..., :1], 3, axis=-1)
