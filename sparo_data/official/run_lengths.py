"""COCO's run lengths of masks, as lists and as text, without pycocotools."""

from __future__ import annotations

from typing import Any

import numpy as np


def decode_run_lengths(shape: Any, side: tuple[int, int]) -> np.ndarray:
    """Return a mask (height, width) bool from `{"size": [height, width], "counts": …}`.

    Raises:
        KeyError, TypeError, ValueError: other keys or types, or run lengths that do not match the image.
    """
    counts = shape["counts"] if isinstance(shape["counts"], list) else _run_lengths(shape["counts"])
    if list(shape["size"]) != list(side) or min(counts) < 0 or sum(counts) != side[0] * side[1]:
        raise ValueError("run lengths do not match the image")
    # By columns, beginning with background.
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(side, order="F")


def _run_lengths(code: str) -> list[int]:
    """Decode COCO's run lengths: five bits per character, a sixth means that more follow; from the fourth on, differences to the last but one."""
    runs: list[int] = []
    value = bits = 0
    for character in code:
        if bits > 30:
            raise ValueError("a run length in the run-length encoding exceeds the size of any image")
        number = ord(character) - 48
        value |= (number & 31) << bits
        bits += 5
        if number & 32:
            continue
        if number & 16:  # its sign
            value -= 1 << bits
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = bits = 0
    return runs
