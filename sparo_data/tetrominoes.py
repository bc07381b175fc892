"""Tetrominoes, drawn exactly as the published set has them: three of 17 pieces in six colours on black, 35 pixels a side.

The set of google-deepmind/multi_object_datasets cannot be had without its host; this one follows its published description: pieces
of four cells of 5 pixels, no two on the same pixel, 17 of the 19 orientations. Which two are left out, the colours, and where pieces
may stand is not written down anywhere; here the bar is left out, and pieces stand anywhere inside the image.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from sparo_train.core.rng import generator

from .writer import Fields, write_shard, write_wds_layout

SIDE, CELL, PIECES = 35, 5, 3
_COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255)], np.uint8)
_SHAPES = ("##/##", "###/.#.", "###/#..", "###/..#", ".##/##.", "##./.##")


class Drawn(NamedTuple):
    """image (35, 35, 3) uint8; mask (35, 35) uint8, 0 the ground and i + 1 piece i."""

    image: np.ndarray
    mask: np.ndarray


@cache
def orientations() -> list[np.ndarray]:
    """The pieces as cells (h, w) bool: each shape in all its quarter turns, once."""
    found: dict[bytes, np.ndarray] = {}
    for shape in _SHAPES:
        cells = np.array([[letter == "#" for letter in line] for line in shape.split("/")])
        for turn in range(4):
            turned = np.rot90(cells, turn)
            found.setdefault(bytes(turned.shape) + turned.tobytes(), turned)
    return list(found.values())


def draw(rng: np.random.Generator, left_half: bool = False) -> Drawn:
    """One image. `left_half`: pieces stand in the left half alone, as the published test of generalisation trains on."""
    image, mask = np.zeros((SIDE, SIDE, 3), np.uint8), np.zeros((SIDE, SIDE), np.uint8)
    number = 1
    tries = 0
    while number <= PIECES:
        tries += 1
        if tries > 200:  # what stands there leaves no room: begin again
            image[:], mask[:], number, tries = 0, 0, 1, 0
        cells = np.kron(orientations()[rng.integers(len(orientations()))], np.ones((CELL, CELL), bool))
        height, width = cells.shape
        right = (SIDE + 1) // 2 if left_half else SIDE
        if width > right:
            continue
        top, left = rng.integers(0, SIDE - height + 1), rng.integers(0, right - width + 1)
        there = mask[top : top + height, left : left + width]
        if (there[cells] > 0).any():
            continue
        there[cells] = number
        image[top : top + height, left : left + width][cells] = _COLOURS[rng.integers(len(_COLOURS))]
        number += 1
    return Drawn(image, mask)


def make_tetrominoes(
    folder: Path,
    train: int,
    test: int,
    seed: int,
    left_half: bool = False,
    done: Callable[[int, int], None] = lambda _a, _b: None,
) -> None:
    """Write ROOT/train/*.tar with images and masks, and ROOT/masks in the layout of evaluation sets; what is there stays."""
    per_shard = 4096
    for first in range(0, train, per_shard):
        path = folder / "train" / f"{first // per_shard:05d}.tar"
        if not path.exists():
            write_shard(path, _samples("train", range(first, min(train, first + per_shard)), seed, left_half))
        done(min(train, first + per_shard), train)
    if not (folder / "masks/test/nshards.txt").exists():
        write_wds_layout(folder / "masks", _samples("test", range(test), seed, False))


def _samples(part: str, numbers: range, seed: int, left_half: bool) -> Iterator[tuple[str, Fields]]:
    for number in numbers:
        drawn = draw(generator(seed, "tetrominoes", part, number), left_half)
        yield f"{number:08d}", {"png": _png(drawn.image), "mask.png": _png(drawn.mask)}


def _png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG")
    return buffer.getvalue()
