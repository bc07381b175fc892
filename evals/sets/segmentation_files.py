"""Segmentation sets as their authors publish them: Pascal VOC 2012, ADE20K (150 classes), and COCO-Stuff (171 classes)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sparo_train.core.errors import ConfigError, DataError, did_you_mean

from .base import Fact, Layout, lines
from .image_files import MaskedFiles
from .library import VOC_CLASSES

_NOT_COUNTED = 255


class SegmentationFiles(MaskedFiles):
    """Images with label images, whose numbers `table` maps to classes.

    Args:
        root, names: folder, and the images' paths below it.
        masks: the label images' paths below `root`.
        classes: names of the classes.
        table: class of each number in a label image; None: the numbers are the classes.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        masks: Sequence[str],
        classes: Sequence[str],
        table: np.ndarray | None = None,
    ):
        extra = "\n".join(classes).encode() + (b"" if table is None else table.tobytes())
        super().__init__(root, names, masks, "masks", extra)
        self._classes, self._table = list(classes), table

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        key, image, mask = super().read(number)
        return key, image, mask if self._table is None else self._table[np.minimum(mask, len(self._table) - 1)]

    def own_classnames(self) -> list[str]:
        return self._classes


def open_segmentation(root: Path, name: str | None, split: str, background: bool) -> SegmentationFiles:
    """Open a split of a set.

    Args:
        root: its folder.
        name: voc2012, ade20k or coco_stuff.
        split: val, or test for the same images (their test labels are not public); voc2012 also has train.
        background: class 0 of VOC has a name, too.

    Raises:
        ConfigError: an unknown name.
        DataError: files are missing.
    """
    part = "val" if split == "test" else split
    readers = {"voc2012": _voc, "ade20k": _ade, "coco_stuff": _stuff}
    if name not in readers:
        raise ConfigError(f"layout=segmentation: benchmark_name={name}: {did_you_mean(str(name), readers)}")
    return readers[name](root, part, background)


def _voc(root: Path, part: str, background: bool) -> SegmentationFiles:
    top = next((p for p in (root / "VOCdevkit" / "VOC2012", root / "VOC2012") if p.is_dir()), root)
    names = [line.split()[0] for line in lines(top / "ImageSets" / "Segmentation" / f"{part}.txt")]
    # trainaug of Hariharan et al. is in another folder, with numbers instead of colours.
    folder = "SegmentationClassAug" if part == "trainaug" else "SegmentationClass"
    classes = ["background", *VOC_CLASSES] if background else VOC_CLASSES
    images, masks = [f"JPEGImages/{name}.jpg" for name in names], [f"{folder}/{name}.png" for name in names]
    return SegmentationFiles(top, images, masks, classes)


def _ade(root: Path, part: str, _background: bool) -> SegmentationFiles:
    top = root / "ADEChallengeData2016" if (root / "ADEChallengeData2016").is_dir() else root
    folder = {"val": "validation", "train": "training"}.get(part, part)
    names = _names(top / "images" / folder)
    table = [line.split("\t") for line in lines(top / "objectInfo150.txt")[1:]]
    if len(table) != 150 or any(len(row) < 5 for row in table):
        raise DataError(
            f"{top / 'objectInfo150.txt'}: expected 150 rows of five columns, got {len(table)}. Fetch it again."
        )
    # Of "building, edifice", the first name, as in the class lists of published evaluations.
    classes = [row[4].split(",")[0].strip() for row in table]
    images, masks = [f"images/{folder}/{n}.jpg" for n in names], [f"annotations/{folder}/{n}.png" for n in names]
    return SegmentationFiles(top, images, masks, classes)


def _stuff(root: Path, part: str, _background: bool) -> SegmentationFiles:
    folder = {"val": "val2017", "train": "train2017"}.get(part, part)
    top = next((p for p in (root / "stuffthingmaps", root / "annotations") if (p / folder).is_dir()), root)
    maps = (top / folder).relative_to(root).as_posix() if top != root else f"stuffthingmaps/{folder}"
    names = _names(root / folder)
    # Lines are "1: person"; pixels have this number minus one. Eleven numbers do not occur.
    listed: dict[int, str] = {}
    for line in lines(root / "labels.txt"):
        number, _, text = line.partition(":")
        if not number.strip().isdigit():
            raise DataError(f"{root / 'labels.txt'}: expected lines such as '1: person', got {line!r}. Fetch it again.")
        listed[int(number)] = text.strip()
    kept = [number for number in range(1, 183) if number not in _ABSENT]
    if missing := [number for number in kept if number not in listed]:
        raise DataError(f"{root / 'labels.txt'}: has no line for number {missing[0]}. Fetch it again.")
    table = np.full(256, _NOT_COUNTED, np.uint8)
    table[[number - 1 for number in kept]] = np.arange(len(kept))
    images, masks = [f"{folder}/{n}.jpg" for n in names], [f"{maps}/{n}.png" for n in names]
    return SegmentationFiles(root, images, masks, [listed[number] for number in kept], table)


_ABSENT = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91}  # numbers of COCO without a class


def _names(folder: Path) -> list[str]:
    names = sorted(path.stem for path in folder.glob("*.jpg"))
    if not names:
        raise DataError(f"{folder}: has no .jpg files. Unpack the images here.")
    return names


def _open(config: Any, _kind: str, split: str) -> SegmentationFiles:
    ignored = bool(getattr(config, "ignore_background", False))
    return open_segmentation(Path(config.root), config.benchmark_name, split, not ignored)


LAYOUT = Layout(("masks",), _open)
