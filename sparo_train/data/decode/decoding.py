"""The single decoder of images, for training, conversion, checks, evaluation and pages."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin

from ...core.errors import BadSampleError
from .bands import PixelRange, TiffFile, as_rgb, image_values, is_tiff, select, tiff_values, to_uint8
from .jpeg import decode_jpeg

ImageFile.LOAD_TRUNCATED_IMAGES = False  # a truncated file is a bad image instead of a partly grey one

# Raster formats that Pillow recognizes by content. EPS would start Ghostscript, and formats without a signature would
# accept any bytes.
_FORMATS = (
    "JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000", "ICO", "ICNS", "DDS", "QOI", "SGI",
    "PCX", "PSD", "XBM", "XPM",
)  # fmt: skip
_MORE_SUFFIXES = {".jfif": "jpg", ".jpe": "jpg", ".pjpeg": "jpg", ".mpo": "jpg"}
# Keys of an image's `info`: the encoded file, if Pillow itself reduces 16 bits to eight, and if it is a TIFF.
_FILE, _TIFF = "sparo file", "sparo tiff"
# And keys of images of `decode_own`: the image with all of its channels, and whether `to_8bit` finishes decoding it.
_CHANNELS, _UNFINISHED = "sparo channels", "sparo unfinished"
_ORIENTATION, _SUBFILE_TYPE, _REDUCED_OR_MASK = 0x0112, 254, 0b101  # tags of EXIF and TIFF, and two flags of TIFF's
_PHOTOMETRIC = 262  # tag of TIFF; 0: MINISWHITE
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")


class Decoding(NamedTuple):
    """Options of the decoder.

    Attributes:
        upright: apply the EXIF orientation.
        on_white: composite transparent images on white.
        rgb: convert to RGB; False keeps the file's mode.
        pixel_range: how 16-bit, 32-bit and float pixels become 8 bits; None: as Pillow converts them.
        bands: numbers, from 1, of the file's bands that are read; None: red, green and blue.
    """

    upright: bool = True
    on_white: bool = True
    rgb: bool = True
    pixel_range: PixelRange | None = "by_type"
    bands: tuple[int, ...] | None = None


TRAINING = Decoding()
UNCONVERTED = Decoding(rgb=False)  # upright and on white, in the mode of the file
# Input of open_clip's evaluation: the file as opened by Pillow, which the transform resizes in the file's own mode.
PUBLISHED = Decoding(upright=False, on_white=False, rgb=False, pixel_range=None)


@cache
def formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that can be read; HEIC files need the package pillow-heif."""
    with suppress(ImportError):
        from pillow_heif import register_heif_opener  # pyright: ignore[reportMissingImports]

        register_heif_opener()
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@cache
def suffixes() -> dict[str, str]:
    """Return the suffixes of readable files, lower case, and the extension of each in a sample: jpg, png or webp."""
    names = {"JPEG": "jpg", "MPO": "jpg", "WEBP": "webp"}
    pillow_suffixes = {
        suffix: names.get(kind, "png") for suffix, kind in Image.registered_extensions().items() if kind in formats()
    }
    return {**pillow_suffixes, **_MORE_SUFFIXES}


def decode(data: bytes, how: Decoding = TRAINING, shrink_to: int | None = None) -> Image.Image:
    """Decode an image to an image object of Pillow, with Pillow's pixels.

    Args:
        data: the file's bytes.
        how: options.
        shrink_to: allow decoding a JPEG at 1/2, 1/4 or 1/8, with at least this many pixels per side (pixels differ).

    Raises:
        BadSampleError: damaged, truncated, too large, or with pixels that `how` does not map; `detail` has the values.
    """
    if shrink_to is None and (pixels := decode_jpeg(data, how.upright, how.rgb)) is not None:
        return Image.fromarray(pixels)
    image = open_picture(data)
    try:
        if shrink_to is not None:
            image.draft("RGB", (shrink_to, shrink_to))
        if has_16bit_channels(image):
            image.info[_FILE] = data
        if is_tiff(data):
            image.info[_TIFF] = data
        if how.pixel_range is not None:
            _refuse_pages(image)
            image = to_8bit(_without_inversion(image), how.pixel_range)
        else:
            image.load()
        return postprocess(image, how)
    except BadSampleError:
        raise
    except Exception as error:  # decoders of damaged files raise many kinds of errors
        raise BadSampleError("bad image", detail=_first_line(error)) from None


def decode_own(data: bytes) -> Image.Image:
    """Decode an image of a user's own evaluation set as training does: upright, in RGB, and composited on white.

    Deeper pixels than 8 bits are mapped by `to_8bit`, because the encoder's run decides how. `bands_of` still reads the
    file's own channels. Raises like `decode`.
    """
    image = decode(data, PUBLISHED._replace(upright=True))
    if _FILE in image.info or image.mode in _DEEP:
        image = _without_inversion(decode(data, PUBLISHED))  # `to_8bit` rotates after mapping
        image.info[_UNFINISHED] = True
        return image
    shown = postprocess(image, TRAINING)
    shown.info[_CHANNELS] = image
    return shown


def decode_pixels(data: bytes, how: Decoding = TRAINING, shrink_to: int | None = None) -> np.ndarray:
    """Decode an image to an array (H, W, 3) uint8, without an image object if it is a JPEG; with `how.bands`, to these (H, W, C).

    Arguments and errors are those of `decode`, but `shrink_to` also allows a scale of 3/8.
    """
    if how.bands is not None:
        return select(band_values(data), how.bands, how.pixel_range or "by_type")
    pixels = decode_jpeg(data, how.upright, shrink_to=shrink_to)
    # A copy, because torch refuses the read-only view of an image.
    return np.array(decode(data, how._replace(rgb=True), shrink_to)) if pixels is None else pixels


def band_values(data: bytes) -> np.ndarray:
    """Decode an image to (H, W, all its bands) in the file's own dtype. Raises `BadSampleError`."""
    if is_tiff(data):
        return tiff_values(data)
    image = decode(data, TRAINING._replace(on_white=False, rgb=False, pixel_range=None))
    return image_values(image, image.info.get(_FILE))


def to_bands(image: Image.Image | np.ndarray, how: Decoding) -> np.ndarray:
    """Return `how.bands` (H, W, C) uint8 of an image that `decode` returned in its own mode, of a `TiffFile`, or of an array (H, W, all bands).

    Raises:
        BadSampleError: damaged, without one of the bands, or with pixels that `how` does not map.
    """
    assert how.bands is not None
    if isinstance(image, Image.Image):
        image = image.info.get(_CHANNELS, image)
    if isinstance(image, np.ndarray):
        values = image[..., None] if image.ndim == 2 else image
        # Readers of TIFF files often return bands first, which would pass as a very low image of many bands.
        if values.ndim != 3 or not values.size or (values.shape[0] <= 32 < values.shape[2]):
            raise BadSampleError("bad image", detail=f"shape {values.shape}, expected (height, width, bands)")
    else:
        tiff = image.data if isinstance(image, TiffFile) else image.info.get(_TIFF)
        if tiff is None and _FILE not in image.info and has_16bit_channels(image):
            raise BadSampleError("bad image", detail="Pillow keeps 8 of its 16 bits. Give the path of the file instead")
        values = tiff_values(tiff) if tiff is not None else image_values(image, image.info.get(_FILE))
    return select(values, how.bands, how.pixel_range or "by_type")


def display_image(image: Image.Image, how: Decoding) -> Image.Image:
    """Return an image as 8-bit pixels for display; of `how.bands`, the first three are red, green and blue."""
    if how.bands is None:
        return to_8bit(image, how.pixel_range or "by_type")
    return Image.fromarray(as_rgb(to_bands(image, how)))


def open_picture(data: bytes) -> Image.Image:
    """Identify an image by its content and check its size before pixels are decoded. Raises `BadSampleError`."""
    try:
        image = Image.open(io.BytesIO(data), formats=formats())
    except Image.DecompressionBombError:
        raise BadSampleError(
            "too many pixels", detail=f"limit {(Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} million"
        ) from None
    except Exception as error:
        raise BadSampleError("bad image", detail=_explain_unidentified(data) or _first_line(error)) from None
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise BadSampleError("too many pixels", detail=f"{pixels / 1e6:.0f} million, limit {limit / 1e6:.0f} million")
    return image


def postprocess(image: Image.Image, how: Decoding) -> Image.Image:
    """Rotate, composite and convert a decoded image according to `how`."""
    if how.upright:
        image = ImageOps.exif_transpose(image)
    if how.on_white and _has_alpha(image):
        whole = image.convert("RGBA")
        if np.asarray(whole.getchannel("A")).min() < 255:
            image = Image.alpha_composite(Image.new("RGBA", whole.size, (255,) * 4), whole)
    return image.convert("RGB") if how.rgb else image


def notes(image: Image.Image) -> frozenset[str]:
    """Return unusual properties of an opened image: rotated by EXIF, transparent, 16 bits, float, animated, several pages."""
    # First, because `getexif` may decode the image, which then has 8 bits.
    deep = image.mode in _DEEP[:-1] or has_16bit_channels(image)
    conditions = {
        "rotated by EXIF": _is_rotated(image),
        "transparent": _has_alpha(image),
        "more than 8 bits": deep,
        "float": image.mode == "F",
        "animated": getattr(image, "is_animated", False) and image.format != "TIFF",
        "several pages": image.format == "TIFF" and getattr(image, "n_frames", 1) > 1,
    }
    return frozenset(note for note, here in conditions.items() if here)


def _is_rotated(image: Image.Image) -> bool:
    try:
        return image.getexif().get(_ORIENTATION, 1) not in (0, 1)
    except Exception as error:  # Pillow decodes a PNG to find its EXIF, and the file may be damaged
        raise BadSampleError("bad image", detail=_first_line(error)) from None


def is_rotated(data: bytes) -> bool:
    """Return whether EXIF says that the pixels of an image file must be rotated or mirrored. Raises `BadSampleError`."""
    return _is_rotated(open_picture(data))


def refuse_unclear_rotation(data: bytes) -> None:
    """Raise `BadSampleError` for an image with a mask, if EXIF rotates the image and both orientations of the mask have its size.

    These are squares, and images that are mirrored or rotated by 180 degrees. Otherwise, the size of the mask shows
    whether it belongs to the rotated image.
    """
    image = open_picture(data)
    if _is_rotated(image) and (image.width == image.height or ImageOps.exif_transpose(image).size == image.size):
        raise BadSampleError(
            "EXIF rotates the image, but possibly not the mask; save the image without EXIF orientation"
        )


def unscale_labels(table: np.ndarray, data: bytes) -> np.ndarray:
    """Return the numbers in a decoded PNG of labels: Pillow scales gray levels of 2 and 4 bits to 0..255."""
    if not data.startswith(b"\x89PNG"):
        return table
    depth, kind = data[24], data[25]
    return table // (255 // (2**depth - 1)) if kind == 0 and depth in (2, 4) else table


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def has_16bit_channels(image: Image.Image) -> bool:
    """Return whether an image that is not decoded yet has several channels of 16 bits; Pillow keeps the upper eight bits."""
    tiles = getattr(image, "tile", None)
    return image.mode not in _DEEP and bool(tiles) and ";16" in str(tiles[0].args)


def _refuse_pages(image: Image.Image) -> None:
    """Raise `BadSampleError` for a TIFF with several pages, not counting reduced copies, masks and thumbnails of the first."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile) or image.n_frames == 1:
        return
    width, height = image.size
    for page in range(1, image.n_frames):
        image.seek(page)
        marked = int(image.tag_v2.get(_SUBFILE_TYPE, 0)) & _REDUCED_OR_MASK
        if not marked and not (image.width <= 0.75 * width and image.height <= 0.75 * height):
            raise BadSampleError("several pages", detail=f"expected one page, got {image.n_frames}")
    image.seek(0)


def _without_inversion(image: Image.Image) -> Image.Image:
    """Return a 16-bit TIFF in which low values are bright (MINISWHITE) as an ordinary image; Pillow inverts 8-bit ones only."""
    if not image.mode.startswith("I;16") or getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) != 0:
        return image
    inverted = Image.fromarray(65535 - np.asarray(image).astype(np.uint16))
    inverted.info = {**image.info, "exif": image.getexif().tobytes()}
    return inverted


def to_8bit(image: Image.Image, how: PixelRange) -> Image.Image:
    """Map an opened image with 16-bit, 32-bit or float pixels to 8 bits; others are unchanged.

    Orientation and transparency are kept; for an image of `decode_own`, they are applied. Raises `BadSampleError` like `decode`.
    """
    mapped = _map_range(image, how)
    return postprocess(mapped, TRAINING) if _UNFINISHED in image.info else mapped


def _map_range(image: Image.Image, how: PixelRange) -> Image.Image:
    if image.mode in _DEEP:
        values, alpha = np.asarray(image), None
        if isinstance(clear := image.info.get("transparency"), int):
            alpha = np.where(values == clear, 0, 255)
    elif how != "by_type" and _FILE in image.info:
        file = image_values(image, image.info[_FILE])
        values, alpha = file[..., :3], file[..., 3].astype(np.uint16) >> 8 if file.shape[2] == 4 else None
    else:
        image.load()
        return image
    mapped = Image.fromarray(np.ascontiguousarray(to_uint8(values, how, image.mode == "F")))
    if alpha is not None:
        mapped.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    if (exif := image.getexif()).get(_ORIENTATION, 1) != 1:
        mapped.info["exif"] = exif.tobytes()
    return mapped


def from_array(values: np.ndarray, how: PixelRange) -> Image.Image:
    """Return an image from an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of uint8, uint16 or floats.

    Raises:
        BadSampleError: another shape or dtype, or values that `how` does not map.
    """
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)) or not values.size:
        raise BadSampleError("bad image", detail=f"shape {values.shape}, expected (H, W) or (H, W, 3)")
    if values.dtype != np.uint8:
        values = values.astype(values.dtype.newbyteorder("="), copy=False)  # files of some formats are big-endian
        if values.dtype != np.uint16 and values.dtype.kind != "f":
            raise BadSampleError("bad image", detail=f"dtype {values.dtype}; expected uint8, uint16 or floats")
        values = to_uint8(values, how, values.dtype.kind == "f")
    return Image.fromarray(np.ascontiguousarray(values))


def _explain_unidentified(data: bytes) -> str:
    """Explain why Pillow cannot identify a TIFF, with its number of bands and bits."""
    if data[:4] not in (b"II*\0", b"MM\0*"):
        return ""
    try:
        stream = io.BytesIO(data)
        tags: Any = TiffImagePlugin.ImageFileDirectory_v2(stream.read(8))
        stream.seek(tags.next)
        tags.load(stream)
        bands, bits = tags.get(277, 1), tags.get(258, (1,))
        kind = "float" if (tags.get(339) or (1,))[0] == 3 else "integer"
    except Exception:
        return ""
    return f"{bands} bands of {bits[0]} bits ({kind}), expected 1 or 3; data.bands chooses bands"


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    # Pillow names the stream by its address.
    return "no picture that can be read" if "cannot identify" in text else text[:120]
