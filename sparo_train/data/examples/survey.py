"""What images of a source are like: formats, sizes, colours. `data check` and recipes with `auto` read it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from ...core.errors import BadSampleError, DataError
from ..decode.bands import PixelRange, as_rgb, is_tiff, select, tiff_nodata
from ..decode.decoding import band_values, has_16bit_channels, open_picture
from ..sources.base import DataConfig, Source
from .samples import decode_image, image_bytes

_SMALL = 128  # side at which colours are measured, which is enough for mean and standard deviation
_FEW_BITS = 14
_GRAY_LEVELS = 2  # largest difference of channels, in levels, of an image that counts as gray


class ImageFacts(NamedTuple):
    """Facts of one image.

    Attributes:
        kind: format and pixel type, such as `TIFF 16-bit`.
        width, height: pixels.
        mean, square: mean and mean square of red, green and blue, or of the chosen bands, in 0..1.
        gray: it has three channels, and they are equal.
        look: 64-bit hash that similar images share: whether each cell of an 8 x 8 grid is brighter than its neighbour.
        low, high: 1st and 99th percentile of each chosen band in the file's own values; empty for 8 bits and without chosen bands.
        used_bits: bits that the largest integer of a file with more than 8 bits needs, at least 8. 0 for other files, for images of
            one value, and if `pixel_range` is not by_type.
    """

    kind: str
    width: int
    height: int
    mean: tuple[float, ...]
    square: tuple[float, ...]
    gray: bool
    look: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    used_bits: int = 0


def image_facts(data: bytes, pixel_range: PixelRange = "by_type", bands: Sequence[int] | None = None) -> ImageFacts:
    """Return the facts of an encoded image. Raises `BadSampleError` if training could not use it.

    Args:
        data: the file's bytes.
        pixel_range, bands: training's `data.pixel_range` and `data.bands`.
    """
    used_bits = 0
    if bands is None:
        picture = open_picture(data)
        kind, low, high = _kind(picture), (), ()
        image = decode_image(data, pixel_range)
        if pixel_range == "by_type":
            used_bits = _used_bits(picture, image)
        width, height = image.size
        small = np.asarray(image.resize((min(width, _SMALL), min(height, _SMALL)), Image.Resampling.BOX))
    else:
        values = band_values(data)
        height, width = values.shape[:2]
        kind = f"{'TIFF' if is_tiff(data) else open_picture(data).format} {values.dtype}, {values.shape[2]} bands"
        sparse = values[:: -(-height // _SMALL), :: -(-width // _SMALL)]
        low, high = ((), ()) if values.dtype == np.uint8 else _percentiles(sparse, bands, tiff_nodata(data))
        pixels = select(values, bands, pixel_range)
        small = cv2.resize(pixels, (min(width, _SMALL), min(height, _SMALL)), interpolation=cv2.INTER_AREA)
    small = small.reshape(*small.shape[:2], -1)  # OpenCV drops the channel of gray images
    shares = small.reshape(-1, small.shape[2]) / 255
    gray = small.shape[2] == 3 and (small.max(-1).astype(int) - small.min(-1)).max() <= _GRAY_LEVELS
    mean, square = (tuple(float(v) for v in f) for f in (shares.mean(0), (shares**2).mean(0)))
    look = _difference_hash(as_rgb(small))
    return ImageFacts(kind, width, height, mean, square, bool(gray), look, low, high, used_bits)


def _used_bits(picture: Image.Image, mapped: Image.Image) -> int:
    if picture.mode.startswith("I"):
        low, high = picture.getextrema()
    elif has_16bit_channels(picture):  # Pillow reads their upper bytes only
        pixels = np.asarray(mapped)
        low, high = int(pixels.min()) << 8, int(pixels.max()) << 8
    else:
        return 0
    return max(8, int(high).bit_length()) if low != high else 0  # type: ignore[arg-type]


def _percentiles(
    values: np.ndarray, bands: Sequence[int], nodata: float | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if max(bands) > values.shape[2] or values.dtype.kind not in "uif":
        return (), ()  # refused below
    chosen = values[..., [band - 1 for band in bands]].astype(np.float64)
    chosen[~np.isfinite(chosen) | (chosen == nodata)] = np.nan
    if np.isnan(chosen).all((0, 1)).any():  # a band without a single pixel
        return (), ()
    low, high = np.nanpercentile(chosen, (1, 99), axis=(0, 1))
    return tuple(map(float, low)), tuple(map(float, high))


def _kind(image: Image.Image) -> str:
    deep = {"I;16": " 16-bit", "I;16B": " 16-bit", "I;16L": " 16-bit", "I": " 32-bit", "F": " float"}.get(
        image.mode, ""
    )
    return f"{image.format}{deep}{' gray' if image.mode in ('L', 'LA', '1') else ''}"


def _difference_hash(pixels: np.ndarray) -> int:
    cells = cv2.resize(
        cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY), (9, 8), interpolation=cv2.INTER_AREA
    ).astype(int)
    bits = np.packbits((cells[:, 1:] > cells[:, :-1]).ravel())
    return int.from_bytes(bits.tobytes(), "big")


class Survey(NamedTuple):
    """Facts of several images.

    Attributes:
        images: number of images that were looked at.
        kinds: number of images by format and pixel type.
        widths, heights, sides: percentiles 0, 5, 50, 95, 100 of width, height and the shorter side.
        mean, std: of red, green and blue, or of the chosen bands, in 0..1, over all pixels, every image with the same weight.
        gray: share of gray images.
        low, high: of each chosen band in the files' own values, the 5th percentile over images of their 1st percentile, and the 95th of
            their 99th; empty for 8 bits and without chosen bands.
        used_bits: the largest `used_bits` of the images.
    """

    images: int
    kinds: dict[str, int]
    widths: tuple[int, ...]
    heights: tuple[int, ...]
    sides: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    gray: float
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    used_bits: int = 0

    @property
    def full_range(self) -> tuple[int, int] | None:
        """Return the range of values if files with more than 8 bits use at most 14 of them, as those of cameras; by_type makes such images dark."""
        return (0, (1 << self.used_bits) - 1) if 0 < self.used_bits <= _FEW_BITS else None

    @property
    def ranges(self) -> tuple[tuple[float, float], ...]:
        """Return `low` and `high` as a value of `data.pixel_range`; a constant band gets a range of 1."""
        return tuple((low, high if high > low else low + 1) for low, high in zip(self.low, self.high, strict=True))


class Measures:
    """Sums of image facts, and 8 bytes per image for its size (more with chosen bands), so that a billion images fit into memory."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.sizes: list[tuple[int, int]] | np.ndarray = []
        self.sums: np.ndarray | float = 0.0
        self.ranges: list[np.ndarray] = []
        self.gray = 0
        self.used_bits = 0

    def add(self, facts: ImageFacts) -> None:
        self.kinds[facts.kind] += 1
        assert isinstance(self.sizes, list)
        self.sizes.append((facts.width, facts.height))
        self.sums = self.sums + np.array((facts.mean, facts.square))
        if facts.low:
            self.ranges.append(np.array((facts.low, facts.high), np.float32))
        self.gray += facts.gray
        self.used_bits = max(self.used_bits, facts.used_bits)

    def pack(self) -> Measures:
        """Return these measures with the sizes in an array, to pass to another process."""
        self.sizes = np.array(self.sizes, dtype=np.uint32).reshape(-1, 2)
        return self


def summarize(parts: Iterable[Measures]) -> Survey | None:
    """Return the survey of measured images; None if there are none."""
    parts = list(parts)
    sizes = np.concatenate(
        [np.reshape(np.asarray(part.sizes, dtype=np.uint32), (-1, 2)) for part in parts] or [np.zeros((0, 2))]
    )
    if not len(sizes):
        return None
    mean, square = np.asarray(sum(part.sums for part in parts)) / len(sizes)
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    widths, heights, sides = (
        tuple(int(v) for v in np.percentile(values, (0, 5, 50, 95, 100)))
        for values in (sizes[:, 0], sizes[:, 1], sizes.min(1))
    )
    kinds = sum((part.kinds for part in parts), Counter[str]())
    colours = [tuple(float(v) for v in np.round(values, 3)) for values in (mean, std)]
    gray = sum(part.gray for part in parts) / len(sizes)
    ranges = np.array([pair for part in parts for pair in part.ranges])
    low, high = (
        tuple(float(f"{v:.4g}") for v in np.percentile(ranges[:, i], share, axis=0)) if len(ranges) else ()
        for i, share in ((0, 5), (1, 95))
    )
    used_bits = max(part.used_bits for part in parts)
    return Survey(
        len(sizes),
        dict(kinds.most_common()),
        widths,
        heights,
        sides,
        colours[0],
        colours[1],
        gray,
        low,
        high,
        used_bits,
    )


def survey(sources: Sequence[Source], config: DataConfig, count: int = 256) -> Survey:
    """Return the survey of `count` evenly spaced images of some sources, read as `config` says; broken ones are skipped.

    Raises:
        DataError: none of them can be read, or of all images, more than `data.max_bad_share` cannot be used.
    """
    storages = [(storage, source) for source in sources for storage in source.storages]
    ends = list(accumulate(len(storage) for storage, _ in storages))
    total = ends[-1] if ends else 0
    measures, problem, bad_count = Measures(), "the data contain none", 0
    for at in sorted({i * total // count for i in range(count)} if total else ()):
        number = bisect_right(ends, at)
        storage, source = storages[number]
        key = f"sample {at}"
        try:
            key, fields = storage.read(at - (ends[number - 1] if number else 0))
            data = image_bytes(fields, source.config.image_keys)
            measures.add(image_facts(data, config.pixel_range, config.bands))
        except BadSampleError as bad:
            bad_count += 1
            problem = f"{storage.url}: {key}: {bad.full_message()}"
    if (result := summarize([measures])) is None:
        raise DataError(f"no image can be read; {problem}")
    if total <= count and bad_count > config.max_bad_share * total:  # training would stop after the first passes
        raise DataError(
            f"data: {bad_count} of {total} images cannot be used (for example, {problem}), which is more than "
            f"data.max_bad_share={config.max_bad_share:g} allows. `sparo data check` names them. Remove them, or "
            "raise data.max_bad_share."
        )
    return result
