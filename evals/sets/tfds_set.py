"""VTAB's sets as TensorFlow Datasets stores them, in record files, without TensorFlow.

A split of VTAB is a percentage of a split of the record files, whose order is that of an MD5 of each example's name
(`md5_order`), so the same test images can also be found in the authors' own files (vtab_files.py).
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from sparo_train.core.errors import DataError
from sparo_train.data.decode.tfrecord import Value, parse_example, record_at, record_offsets

from .base import EvalSet, Fact, lines, sha256, stat_files
from .pictures import decode_image

Features = Mapping[str, Value]
_VEHICLES = 3  # KITTI's first types of objects: car, van, truck
_NEAR, _FAR, _NONE = 8.0, 20.0, 999.0  # metres between VTAB's classes of the closest vehicle


class Split(NamedTuple):
    """Part of a split of the record files, from `first` to `last` per cent."""

    records: str
    first: int = 0
    last: int = 100

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the numbers of the first example and of the one after the last, rounded as in TensorFlow Datasets."""
        begin, end = (round(percent * count / 100.0) for percent in (self.first, self.last))
        return begin, end


class RecordSpec(NamedTuple):
    """A set of VTAB in record files.

    Attributes:
        builder: name of the files before `-SPLIT.tfrecord`.
        label: returns the class of an example.
        splits: VTAB's splits.
        names: feature whose NAME.labels.txt lists the classes; empty: none does.
        classes: number of classes without names of their own, which are called 0, 1, …
        scale: factor of pixel values.
    """

    builder: str
    label: Callable[[Features], int]
    splits: Mapping[str, Split]
    names: str = ""
    classes: int = 0
    scale: int = 1


def _number(name: str) -> Callable[[Features], int]:
    return lambda features: int(features[name][0])


def vehicle_class(types: Iterable[int], depths: Iterable[float]) -> int:
    """Return VTAB's class of the closest vehicle in KITTI: up to 8 m, up to 20 m, farther, none."""
    of_vehicles = [depth for kind, depth in zip(types, depths, strict=True) if kind < _VEHICLES]
    distance = float(np.float32(min(of_vehicles, default=1000.0)))
    return sum(distance > limit for limit in (_NEAR, _FAR, _NONE))


def _kitti(features: Features) -> int:
    places = np.asarray(features["objects/location"], np.float64).reshape(-1, 3)
    return vehicle_class(np.asarray(features["objects/type"]).tolist(), places[:, 2].tolist())


_OFFICIAL = {"train": Split("train"), "validation": Split("validation"), "test": Split("test")}
_FIFTHS = {"train": Split("train", 0, 60), "validation": Split("train", 60, 80), "test": Split("train", 80)}
_TENTHS = {"train": Split("train", 0, 80), "validation": Split("train", 80, 90), "test": Split("train", 90)}
_HALVES = {"train": Split("train"), "validation": Split("test", 0, 50), "test": Split("test", 50)}
SPECS = {
    "vtab/caltech101": RecordSpec(
        "caltech101",
        _number("label"),
        {"train": Split("train", 0, 90), "validation": Split("train", 90), "test": Split("test")},
        "label",
    ),
    "vtab/diabetic_retinopathy": RecordSpec("diabetic_retinopathy_detection", _number("label"), _OFFICIAL),
    "vtab/dmlab": RecordSpec("dmlab", _number("label"), _OFFICIAL),
    # clip-benchmark's classes are the 40 orientations and 32 positions themselves; VTAB joins them to 16.
    "vtab/dsprites_label_orientation": RecordSpec("dsprites", _number("label_orientation"), _TENTHS, "", 40, 255),
    "vtab/dsprites_label_x_position": RecordSpec("dsprites", _number("label_x_position"), _TENTHS, "", 32, 255),
    "vtab/eurosat": RecordSpec("eurosat", _number("label"), _FIFTHS, "label"),
    "vtab/kitti_closest_vehicle_distance": RecordSpec("kitti", _kitti, _OFFICIAL),
    "vtab/resisc45": RecordSpec("resisc45", _number("label"), _FIFTHS, "label"),
    "vtab/smallnorb_label_azimuth": RecordSpec("smallnorb", _number("label_azimuth"), _HALVES, "", 18),
    "vtab/smallnorb_label_elevation": RecordSpec("smallnorb", _number("label_elevation"), _HALVES, "", 9),
}


def select_split(spec: RecordSpec, split: str, root: Path) -> Split:
    """Return a split of VTAB. Raises `DataError` for another name."""
    if split not in spec.splits:
        raise DataError(f"{root}: has no split {split}. Name one of {', '.join(spec.splits)}.")
    return spec.splits[split]


def md5_order(split: str, keys: Sequence[str]) -> list[int]:
    """Return the order in which TensorFlow Datasets stores examples with these names (from version 4.2 on)."""
    digests = [hashlib.md5(split.encode() + key.encode(), usedforsecurity=False).digest() for key in keys]
    return sorted(range(len(keys)), key=digests.__getitem__)


def record_files(root: Path, builder: str, split: str) -> list[Path]:
    """Return the record files of a split in root or its newest version folder; empty if there are none.

    Raises:
        DataError: files of the split are missing.
    """
    paths: dict[Path, list[Path]] = {}
    for path in root.glob(f"**/{builder}-{split}.tfrecord*"):
        paths.setdefault(path.parent, []).append(path)
    if not paths:
        return []
    folder = max(paths, key=lambda place: [int(part) for part in re.findall(r"\d+", place.name)])
    files = sorted(paths[folder])
    if numbered := re.search(r"-of-(\d+)$", files[0].name):
        wanted = {f"-{i:05d}-of-{numbered[1]}" for i in range(int(numbered[1]))}
        missing = sorted(wanted - {path.name[-len("-00000-of-00000") :] for path in files})
        if missing:
            raise DataError(
                f"{folder}: lacks {len(missing)} of {numbered[1]} files, such as {builder}-{split}.tfrecord{missing[0]}. Fetch them."
            )
    return files


class RecordSet(EvalSet):
    """A split of VTAB in record files; keys are numbers in the split of the files."""

    kind = "label"

    def __init__(self, root: Path, name: str, split: str, files: Sequence[Path]):
        self.root, self._spec, self._files = root, SPECS[name], list(files)
        self._split = select_split(self._spec, split, root)
        self._sizes = stat_files(self._files)
        counts = [len(_offsets(path, self._sizes)) for path in self._files]
        self._ends = [0, *accumulate(counts)]
        self._begin, self._end = self._split.bounds(self._ends[-1])

    def __len__(self) -> int:
        return self._end - self._begin

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        at = self._begin + number
        file = bisect_right(self._ends, at) - 1
        path = self._files[file]
        offset = _offsets(path, self._sizes)[at - self._ends[file]]
        where = f"{path}: record {at - self._ends[file]}"
        features = parse_example(record_at(path, offset), where)
        try:
            label, data = self._spec.label(features), features["image"][0]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise DataError(
                f"{where}: is not an example of {self._spec.builder} ({error!r}). Check whether the files belong to "
                "another set."
            ) from None
        if not isinstance(data, bytes):
            raise DataError(f"{where}: has no image. Check whether the files belong to another set.")
        image = decode_image(data, where)
        if self._spec.scale != 1:
            image = Image.fromarray(np.asarray(image) * np.uint8(self._spec.scale))
        return f"{self._split.records}/{at:06d}", image, label

    def identity(self) -> str:
        names = [path.name for path in self._files]
        return sha256(
            "records", self._spec.builder, str(self._split), str(self.own_classnames()), str(names), self._sizes[0]
        )

    def stamp(self) -> str:
        return sha256(self._sizes[1])

    def own_classnames(self) -> list[str]:
        listed = self._files[0].parent / f"{self._spec.names}.labels.txt"
        if self._spec.names and listed.is_file():
            return lines(listed)
        return [str(number) for number in range(self._spec.classes)]


@lru_cache(256)
def _offsets(path: Path, _stamp: tuple[bytes, bytes]) -> list[int]:
    return record_offsets(path)


def absent_error(root: Path, name: str, raw: str) -> DataError:
    """Return the error for a folder that has a set in none of the known forms."""
    spec = SPECS[name]
    records = f"{spec.builder}-{spec.splits['test'].records}.tfrecord-*"
    return DataError(
        f"{root}: has neither {records} (TensorFlow Datasets) nor {raw}. Fetch one of them, or the wds layout."
    )
