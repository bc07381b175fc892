"""What the json of an episode tells of its objects, as plain data that probes are fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.video.episode import Episode

_NUMBERS = {"positions": "position", "velocities": "velocity", "angular_velocities": "angular_velocity"}
# Numbers that an object has once, by the first of these names that all have: MOVi-C to F's, MOVi-A's and B's.
_CONSTANT = {"size": (("scale", "size"), ()), "color": (("rgb", "color_rgb"), (3,))}
_WORDS = ("color", "shape", "material", "size", "category")


def object_annotations(episode: Episode, frames: int, where: str) -> dict[str, Any]:
    """Of the first `frames` times: `frames` (T), `position` (T, M, 3), `numbers` by name (T, M) or (T, M, c), `words` by name (M).

    Raises:
        DataError: an episode that tells of no objects, or not where they are.
    """
    try:
        objects = episode.metadata.get("objects")
    except BadSampleError as bad:
        raise DataError(f"{where}: {bad}; repair it, or take it out") from None
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise DataError(
            f"{where}: its json has no list `objects`; probes need what sparo data movi-like, scenes3d and MOVi tell of them"
        )
    tables = {name: [_table(one, name, len(episode), frames) for one in objects] for name in _NUMBERS}
    if any(table is None for table in tables["positions"]):
        raise DataError(f"{where}: an object has no positions (a row of three numbers per frame)")
    numbers = {short: _by_time(tables[name]) for name, short in _NUMBERS.items() if None not in tables[name]}
    for short, (names, shape) in _CONSTANT.items():
        candidates = ([_array(one.get(name), shape) for one in objects] for name in names)
        values = next((rows for rows in candidates if rows and None not in rows), None)
        if values is not None:
            numbers[short] = [[row if shape else [row] for row in values] for _ in range(frames)]
    # A word that some objects lack is no word that a probe could be fitted to.
    words = {
        name: [str(one[name]) for one in objects]
        for name in _WORDS
        if all(isinstance(one.get(name), str) for one in objects)
    }
    position = numbers.pop("position") if objects else []
    return {"frames": frames, "position": position, "numbers": numbers, "words": words}


def _table(one: dict[str, Any], name: str, length: int, frames: int) -> list[Any] | None:
    """A row of three finite numbers for each frame that is read; None where there is no such table."""
    array = _array(one.get(name), (length, 3))
    return None if array is None else array[:frames]


def _array(value: Any, shape: tuple[int, ...]) -> Any:
    """Finite numbers of this shape as plain data; None where it is anything else."""
    if isinstance(value, str | bool) or value is None:  # numpy would make a number of them
        return None
    try:
        table = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):  # whole numbers of JSON have no end
        return None
    return table.tolist() if table.shape == shape and np.isfinite(table).all() else None


def _by_time(tables: list[Any]) -> list[Any]:
    """(M, T, c) to (T, M, c)."""
    return [list(row) for row in zip(*tables, strict=True)]
