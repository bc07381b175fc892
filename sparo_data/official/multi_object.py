"""google-deepmind/multi_object_datasets: CLEVR with masks, Tetrominoes, Objects Room, Multi-dSprites, from their TFRecords.

Attributes are stored as numbers whose meaning is published nowhere; they are kept as numbers, under the files' own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.errors import DataError

from .published import PublishedScene, to_label_map
from .tfrecord import Value, parse_example, records


class MultiObjectSet(NamedTuple):
    """side: height and width, which the files do not hold.  background: entities that are no objects.  entities_last: (H, W, K) masks."""

    side: tuple[int, int]
    background: int = 1
    entities_last: bool = False


SETS = {
    "clevr_with_masks": MultiObjectSet((240, 320)),
    "tetrominoes": MultiObjectSet((35, 35)),
    "objects_room": MultiObjectSet((64, 64), background=4),  # floor, sky and two walls
    "multi_dsprites": MultiObjectSet((64, 64), entities_last=True),
}


def multi_object(path: Path, name: str) -> Iterator[PublishedScene]:
    """The scenes of one file.

    Raises:
        DataError: a file that breaks off, or of another set.
    """
    for number, record in enumerate(records(path)):
        where = f"{path}: record {number}"
        yield _scene(parse_example(record, where), SETS[name], f"{path.name.partition('.')[0]}_{number:08d}", where)


def _scene(features: dict[str, Value], s: MultiObjectSet, key: str, where: str) -> PublishedScene:
    height, width = s.side
    image, masks = (_bytes(features, field, where) for field in ("image", "mask"))
    if len(image) != height * width * 3 or not len(masks) or len(masks) % (height * width):
        raise DataError(
            f"{where}: {len(image)} and {len(masks)} bytes of image and masks do not fit {height} x {width} pixels; is it another set?"
        )
    count = len(masks) // (height * width)
    shares = (
        masks.reshape(height, width, count).transpose(2, 0, 1)
        if s.entities_last
        else masks.reshape(count, height, width)
    )
    # Masks are smooth at edges and overlap there: a pixel is of whom it is most.
    label = to_label_map(np.maximum(shares.argmax(0).astype(np.int64) - s.background + 1, 0), where)
    return PublishedScene(key, image.reshape(height, width, 3), label, {"objects": _objects(features, s, count)})


def _objects(features: dict[str, Value], s: MultiObjectSet, count: int) -> list[dict[str, Any]]:
    objects = []
    # Whatever has a number for every entity is a fact of it, under the file's own name.
    factors = {name: np.asarray(value).reshape(count, -1) for name, value in features.items()
               if name not in ("image", "mask") and isinstance(value, np.ndarray) and value.size and value.size % count == 0}  # fmt: skip
    there = factors.get("visibility")
    for k in range(s.background, count):
        if there is None or there[k, 0] > 0:
            row = {name: values[k].tolist() for name, values in factors.items()}
            objects.append({"id": k - s.background + 1, **{n: v[0] if len(v) == 1 else v for n, v in row.items()}})
    return objects


def _bytes(features: dict[str, Value], field: str, where: str) -> np.ndarray:
    value = features.get(field)
    if isinstance(value, list) and len(value) == 1:  # one string for all pixels
        value = np.frombuffer(value[0], np.uint8)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        raise DataError(
            f"{where}: has no {field!r} of bytes (it has {', '.join(sorted(features)) or 'nothing'}); is it another set?"
        )
    return value
