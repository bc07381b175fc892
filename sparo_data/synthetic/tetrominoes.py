"""Tetrominoes in the style of the published set: three of 17 pieces in six colours on black, 35 pixels per side.

The set of google-deepmind/multi_object_datasets is only available from its host. This one follows its published
description: pieces of four cells of 5 pixels, no two on the same pixel, 17 of the 19 orientations. The description does
not say which two orientations are missing, which colours are used, and where pieces may be. Here the bar is missing,
and pieces can be anywhere inside the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparo_train.core.config import Frozen, field
from sparo_train.core.rng import generator

from ..writer import Fields, encode_image, write_manifest, write_shard, write_wds_layout

SIDE, CELL, PIECES = 35, 5, 3
_COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255)], np.uint8)
_SHAPES = ("##/##", "###/.#.", "###/#..", "###/..#", ".##/##.", "##./.##")


class TetrominoImage(NamedTuple):
    """An image: image (35, 35, 3) uint8; mask (35, 35) uint8, 0 for the background and i + 1 for piece i."""

    image: np.ndarray
    mask: np.ndarray


@cache
def orientations() -> list[np.ndarray]:
    """Return the pieces as cells (h, w) bool: each shape in all its distinct quarter turns."""
    pieces: dict[bytes, np.ndarray] = {}
    for shape in _SHAPES:
        cells = np.array([[letter == "#" for letter in line] for line in shape.split("/")])
        for turn in range(4):
            turned = np.rot90(cells, turn)
            # Include the shape, because the lying and the standing bar have the same cells in a row.
            pieces.setdefault(bytes(turned.shape) + turned.tobytes(), turned)
    return list(pieces.values())


def render_image(rng: np.random.Generator, left_half: bool = False) -> TetrominoImage:
    """Render one image. `left_half`: pieces are in the left half only, as in training for the published test of generalisation."""
    image, mask = np.zeros((SIDE, SIDE, 3), np.uint8), np.zeros((SIDE, SIDE), np.uint8)
    number = 1
    tries = 0
    while number <= PIECES:
        tries += 1
        if tries > 200:  # existing pieces leave no space: start over
            image[:], mask[:], number, tries = 0, 0, 1, 0
        # A new piece at every try, because retrying the same one would favour small pieces in little space.
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
    return TetrominoImage(image, mask)


class TetrominoesConfig(Frozen):
    """Options. Equal configs give equal bytes."""

    seed: int = field(0, "Random seed of all images.")
    train: int = field(60_000, "Images for training.", gt=0)
    test: int = field(320, "Images with masks for evaluation.", gt=0)
    left_half: bool = field(False, "In training images, place the pieces in the left half only.")


def make_tetrominoes(
    root: Path, config: TetrominoesConfig, on_progress: Callable[[int, int], None] = lambda _a, _b: None
) -> None:
    """Write ROOT/train/*.tar with images and masks, and ROOT/masks in the layout of evaluation sets; existing files are kept.

    Raises:
        DataError: `root` contains images of another config.
    """
    write_manifest(root, config, "tetrominoes.json")
    per_shard = 4096
    for first in range(0, config.train, per_shard):
        path, last = root / "train" / f"{first // per_shard:05d}.tar", min(config.train, first + per_shard)
        if not path.exists():
            write_shard(path, _samples("train", range(first, last), config))
        on_progress(last, config.train)
    # Written last, so that its presence means that the set is complete.
    if not (root / "masks/test/nshards.txt").exists():
        write_wds_layout(root / "masks", _samples("test", range(config.test), config))


def _samples(part: str, numbers: range, config: TetrominoesConfig) -> Iterator[tuple[str, Fields]]:
    for number in numbers:
        sample = render_image(generator(config.seed, "tetrominoes", part, number), config.left_half and part == "train")
        yield f"{number:08d}", {"png": encode_image(sample.image), "mask.png": encode_image(sample.mask)}
