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

from ...core.errors import BadSampleError
from ..decode.decoding import PixelRange, open_picture
from ..sources.base import Source
from .samples import decode_image, image_bytes

_SMALL = 128  # side at which colours are measured, which is enough for mean and standard deviation
_GRAY_LEVELS = 2  # largest difference of channels, in levels, of an image that counts as gray


class ImageFacts(NamedTuple):
    """Facts of one image.

    Attributes:
        kind: format and pixel type, such as `TIFF 16-bit`.
        width, height: pixels.
        mean, square: mean and mean square of red, green and blue in 0..1.
        gray: all channels are equal.
        look: 64-bit hash that similar images share: whether each cell of an 8 x 8 grid is brighter than its neighbour.
    """

    kind: str
    width: int
    height: int
    mean: tuple[float, float, float]
    square: tuple[float, float, float]
    gray: bool
    look: int


def image_facts(data: bytes, pixel_range: PixelRange = "by_type") -> ImageFacts:
    """Return the facts of an encoded image. Raises `BadSampleError` if training could not use it."""
    opened = open_picture(data)
    kind = _kind(opened)
    image = decode_image(data, pixel_range)
    small = np.asarray(image.resize((min(image.width, _SMALL), min(image.height, _SMALL)), Image.Resampling.BOX))
    values = small.reshape(-1, 3) / 255
    spread = small.max(-1).astype(int) - small.min(-1)
    mean, square = (tuple(float(v) for v in f) for f in (values.mean(0), (values**2).mean(0)))
    return ImageFacts(kind, image.width, image.height, mean, square, bool(spread.max() <= _GRAY_LEVELS), _look(small))  # type: ignore[arg-type]


def _kind(image: Image.Image) -> str:
    deep = {"I;16": " 16-bit", "I;16B": " 16-bit", "I;16L": " 16-bit", "I": " 32-bit", "F": " float"}.get(
        image.mode, ""
    )
    return f"{image.format}{deep}{' gray' if image.mode in ('L', 'LA', '1') else ''}"


def _look(pixels: np.ndarray) -> int:
    cells = cv2.resize(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (9, 8), interpolation=cv2.INTER_AREA).astype(int)
    bits = np.packbits((cells[:, 1:] > cells[:, :-1]).ravel())
    return int.from_bytes(bits.tobytes(), "big")


class Survey(NamedTuple):
    """Facts of several images.

    Attributes:
        images: number of images that were looked at.
        kinds: number of images by format and pixel type.
        widths, heights, sides: percentiles 0, 5, 50, 95, 100 of width, height and the shorter side.
        mean, std: of red, green and blue in 0..1, over all pixels, every image with the same weight.
        gray: share of gray images.
    """

    images: int
    kinds: dict[str, int]
    widths: tuple[int, ...]
    heights: tuple[int, ...]
    sides: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    gray: float


class Measures:
    """Sums of image facts, and 8 bytes per image for its size, so that a billion images fit into memory."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.sizes: list[tuple[int, int]] | np.ndarray = []
        self.sums = np.zeros((2, 3))
        self.gray = 0

    def add(self, facts: ImageFacts) -> None:
        self.kinds[facts.kind] += 1
        assert isinstance(self.sizes, list)
        self.sizes.append((facts.width, facts.height))
        self.sums += (facts.mean, facts.square)
        self.gray += facts.gray

    def packed(self) -> Measures:
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
    mean, square = sum((part.sums for part in parts), np.zeros((2, 3))) / len(sizes)
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    widths, heights, sides = (
        tuple(int(v) for v in np.percentile(values, (0, 5, 50, 95, 100)))
        for values in (sizes[:, 0], sizes[:, 1], sizes.min(1))
    )
    kinds = sum((part.kinds for part in parts), Counter[str]())
    colours = [tuple(float(v) for v in np.round(values, 3)) for values in (mean, std)]
    gray = sum(part.gray for part in parts) / len(sizes)
    return Survey(len(sizes), dict(kinds.most_common()), widths, heights, sides, colours[0], colours[1], gray)


def survey(sources: Sequence[Source], count: int = 256, pixel_range: PixelRange = "by_type") -> Survey | None:
    """Return the survey of `count` evenly spaced images of some sources; broken ones are skipped."""
    storages = [(storage, source) for source in sources for storage in source.storages]
    ends = list(accumulate(len(storage) for storage, _ in storages))
    total = ends[-1] if ends else 0
    measures = Measures()
    for at in sorted({i * total // count for i in range(count)} if total else ()):
        number = bisect_right(ends, at)
        storage, source = storages[number]
        try:
            _, fields = storage.read(at - (ends[number - 1] if number else 0))
            measures.add(image_facts(image_bytes(fields, source.config.image_keys), pixel_range))
        except BadSampleError:
            continue
    return summarize([measures])
