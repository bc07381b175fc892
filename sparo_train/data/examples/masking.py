"""Masked patches for iBOT: rectangles, as in BEiT (Bao et al. 2022, Algorithm 1) and DINOv2."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_ASPECT, _SMALLEST, _ATTEMPTS = (
    0.3,
    4,
    10,
)  # smallest aspect ratio and area of a rectangle, and placements tried in a row


class Masking(NamedTuple):
    """Masks of one of the two global crops of an image, at random.

    DINOv2 masks each global crop with probability one half. Here every image has one masked crop, so that each sample
    has at most `most` masked patches, whatever the batch that it is in.

    Attributes:
        grid: patches per side.
        ratio: range of the share of patches that are masked.
        most: largest number of masked patches.
    """

    grid: int
    ratio: tuple[float, float]
    most: int

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return masked positions among the patches of both crops, (most,) int32, sorted; the rest has the number after the last patch."""
        patches = self.grid**2
        count = min(self.most, max(1, round(rng.uniform(*self.ratio) * patches)))
        first = patches * int(rng.integers(2))
        places = np.full(self.most, 2 * patches, dtype=np.int32)
        places[:count] = first + np.flatnonzero(rectangles(self.grid, count, rng))
        return places


def rectangles(grid: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return a mask (grid, grid) bool with `count` true values in rectangles; single patches fill what no rectangle fits into."""
    mask = np.zeros((grid, grid), dtype=bool)
    failures = 0
    while (missing := count - int(mask.sum())) and failures < _ATTEMPTS:
        area = rng.uniform(min(_SMALLEST, missing), missing)
        aspect = math.exp(rng.uniform(math.log(_ASPECT), -math.log(_ASPECT)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        failures += 1
        if not (0 < height <= grid and 0 < width <= grid):
            continue
        top, left = (int(rng.integers(grid - side + 1)) for side in (height, width))
        window = mask[top : top + height, left : left + width]
        if 0 < window.size - window.sum() <= missing:
            window[:] = True
            failures = 0
    free = np.flatnonzero(~mask)
    mask.flat[rng.choice(free, count - int(mask.sum()), replace=False)] = True
    return mask
