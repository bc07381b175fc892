"""Objects with attributes as CLEVR names them, as rows of numbers: what set prediction is taught and scored with.

A row: position (3) as (c + 3) / 6, then one-hot size (2), material (2), shape (3), colour (8), then 1 for an object that is there;
the order of Locatello et al. 2020. The scene is the sample's `.json`, whose `objects` have CLEVR's own keys, or `position` for `3d_coords`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sparo_train.core.errors import BadSampleError

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "size": ("large", "small"),
    "material": ("rubber", "metal"),
    "shape": ("cube", "sphere", "cylinder"),
    "color": ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"),
}
REACH = 3.0  # positions lie in -REACH … REACH
_FARTHEST = 1e6  # a coordinate that is farther is no place
WIDTH = 3 + sum(map(len, ATTRIBUTES.values())) + 1


def attribute_columns() -> dict[str, slice]:
    """Where each attribute stands in a row."""
    columns, at = {}, 3
    for name, words in ATTRIBUTES.items():
        columns[name], at = slice(at, at + len(words)), at + len(words)
    return columns


def object_rows(text: bytes) -> np.ndarray:
    """(n, WIDTH) fp32 of a scene's JSON.

    Raises:
        BadSampleError: no JSON, no objects in it, or one whose attributes are missing or none of these.
    """
    try:
        listed = json.loads(text)["objects"]
        assert isinstance(listed, list)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise BadSampleError(".json has no list `objects`") from None
    rows = np.zeros((len(listed), WIDTH), np.float32)
    columns = attribute_columns()
    for number, (row, thing) in enumerate(zip(rows, listed, strict=True)):
        if not isinstance(thing, dict):
            raise BadSampleError(f".json: object {number} is no mapping")
        row[:3], row[-1] = _position(thing, number), 1
        for name, words in ATTRIBUTES.items():
            if thing.get(name) not in words:
                raise BadSampleError(
                    f".json: object {number}: {name}={thing.get(name)!r} is none of {', '.join(words)}"
                )
            row[columns[name]][words.index(thing[name])] = 1
    return rows


def _position(thing: dict[str, Any], number: int) -> np.ndarray:
    at = thing.get("position", thing.get("3d_coords"))
    try:
        position = np.array(at, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        position = np.empty(0)
    if position.shape != (3,) or not (np.abs(position) < _FARTHEST).all():  # NaN is not below it either
        raise BadSampleError(f".json: object {number}: position={at!r} is no x, y, z")
    return ((position + REACH) / (2 * REACH)).astype(np.float32)
