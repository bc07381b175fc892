"""Annotated objects of scenes and episodes: CLEVR's attributes as rows of numbers, and an episode's JSON as arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.video.episode import Episode

_NUMBERS = {"positions": "position", "velocities": "velocity", "angular_velocities": "angular_velocity"}
# Numbers that an object has once, under the first of these names that all objects have: MOVi-C to F's, then MOVi-A's
# and B's.
_CONSTANT = {"size": (("scale", "size"), ()), "color": (("rgb", "color_rgb"), (3,))}
_WORDS = ("color", "shape", "material", "size", "category")


def object_annotations(episode: Episode, frames: int, where: str) -> dict[str, Any]:
    """Return annotations of the first `frames` times: `frames` (T), `position` (T, M, 3), `numbers` by name (T, M) or (T, M, c), `words` by name (M).

    Raises:
        DataError: the episode lists no objects, or not their positions.
    """
    try:
        objects = episode.metadata.get("objects")
    except BadSampleError as bad:
        raise DataError(f"{where}: {bad}. Repair this sample, or remove it.") from None
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise DataError(
            f"{where}: its json has no list `objects`, which is required by probes. Use MOVi, or a set created by "
            "`sparo data movi-like` or `sparo data scenes3d`."
        )
    tables = {name: [_table(one, name, len(episode), frames) for one in objects] for name in _NUMBERS}
    if any(table is None for table in tables["positions"]):
        raise DataError(f"{where}: an object has no positions (a row of three numbers per frame)")
    numbers = {short: _time_first(tables[name]) for name, short in _NUMBERS.items() if None not in tables[name]}
    for short, (names, shape) in _CONSTANT.items():
        candidates = ([_array(one.get(name), shape) for one in objects] for name in names)
        values = next((rows for rows in candidates if rows and None not in rows), None)
        if values is not None:
            numbers[short] = [[row if shape else [row] for row in values] for _ in range(frames)]
    # A probe cannot be fitted to a word that some objects lack.
    words = {
        name: [str(one[name]) for one in objects]
        for name in _WORDS
        if all(isinstance(one.get(name), str) for one in objects)
    }
    position = numbers.pop("position") if objects else []
    return {"frames": frames, "position": position, "numbers": numbers, "words": words}


def _table(one: dict[str, Any], name: str, length: int, frames: int) -> list[Any] | None:
    """Return a row of three finite numbers for each frame; None without such a table."""
    array = _array(one.get(name), (length, 3))
    return None if array is None else array[:frames]


def _array(value: Any, shape: tuple[int, ...]) -> Any:
    """Return finite numbers of this shape from plain data; None for anything else."""
    if isinstance(value, str | bool) or value is None:  # numpy would convert it to a number
        return None
    try:
        table = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):  # JSON integers have no size limit
        return None
    return table.tolist() if table.shape == shape and np.isfinite(table).all() else None


def _time_first(tables: list[Any]) -> list[Any]:
    """Rearrange (M, T, c) to (T, M, c)."""
    return [list(row) for row in zip(*tables, strict=True)]


ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "size": ("large", "small"),
    "material": ("rubber", "metal"),
    "shape": ("cube", "sphere", "cylinder"),
    "color": ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"),
}
REACH = 3.0  # positions lie in -REACH … REACH
_FARTHEST = 1e6  # larger coordinates are invalid
WIDTH = 3 + sum(map(len, ATTRIBUTES.values())) + 1


def attribute_columns() -> dict[str, slice]:
    """Return the columns of each attribute in a row."""
    columns, at = {}, 3
    for name, words in ATTRIBUTES.items():
        columns[name], at = slice(at, at + len(words)), at + len(words)
    return columns


def object_rows(text: bytes) -> np.ndarray:
    """Return (n, WIDTH) fp32 of a scene's JSON.

    Raises:
        BadSampleError: not JSON, no objects in it, or one whose attributes are missing or unknown.
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
            raise BadSampleError(f".json: object {number} is not a mapping")
        row[:3], row[-1] = _position(thing, number), 1
        for name, words in ATTRIBUTES.items():
            if thing.get(name) not in words:
                raise BadSampleError(
                    f".json: object {number}: {name}={thing.get(name)!r} is not one of {', '.join(words)}"
                )
            row[columns[name]][words.index(thing[name])] = 1
    return rows


def _position(thing: dict[str, Any], number: int) -> np.ndarray:
    at = thing.get("position", thing.get("3d_coords"))
    try:
        position = np.array(at, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        position = np.empty(0)
    if position.shape != (3,) or not (np.abs(position) < _FARTHEST).all():  # false for NaN, too
        raise BadSampleError(f".json: object {number}: position={at!r} is not x, y, z")
    return ((position + REACH) / (2 * REACH)).astype(np.float32)
