"""Image folders, `CLASS/…/name.jpg` as in torchvision's ImageFolder, read by position like shards.

Training, conversion and evaluation share one rule: the class is the first folder below the root, however deep the file
is. Classes are ordered by number if all names are integers, otherwise by name. Hidden files and folders are skipped,
links are followed.

Files are put in an order that mixes the classes and depends on names only, then cut into parts of 1,000. The plan
treats a part as a shard.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from ...core.config import field, resumable_field
from ...core.errors import BadSampleError, DataError
from ...core.files import read_bytes
from ..decode.decoding import suffixes
from ..servers.remote import remedy
from .base import SourceConfig, SourceKind, Storage

logger = logging.getLogger(__name__)

_PART = 1000
# Captions, annotations, and files of file managers, which do not count as skipped images.
_SIDECARS = {".txt", ".json", ".csv", ".tsv", ".md", ".xml", ".yaml", ".yml", ".html"}
_SYSTEM_FILES = {"thumbs.db", "desktop.ini"}
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "dev"}
_WRAPPERS = {
    "images",
    "imgs",
    "img",
    "pictures",
    "photos",
    "data",
    "dataset",
}  # names of folders that contain the class folders


class PictureFiles(NamedTuple):
    """Readable images (`names`, sorted paths below the root), and the number of skipped files by suffix (`left_out`)."""

    names: list[str]
    left_out: dict[str, int]


class FolderConfig(SourceConfig):
    """Images, in class folders or not, for objectives that read no captions."""

    kind: Literal["folder"] = field("folder", "Format of the data: an entry of sparo.sources.")
    folder: str = resumable_field(..., "Folder of images, or folder with one folder per class, as in imagenet/train.")
    has_captions: ClassVar[bool] = False


class FolderPart(Storage):
    """Some files of an image folder. A sample has the image, by its suffix, and `cls`, the class's number, if there are classes."""

    def __init__(self, url: str, root: Path, names: np.ndarray, classes: list[str], left_out: Mapping[str, int]):
        self.url, self.root, self._names, self._numbers = url, root, names, {name: i for i, name in enumerate(classes)}
        self.left_out = left_out  # of the whole folder

    def __len__(self) -> int:
        return len(self._names)

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Return the key and members of a file. Raises `BadSampleError` if it cannot be read."""
        name = os.fsdecode(self._names[number])
        try:
            data = read_bytes(self.root / name, DataError)
        except DataError:
            raise BadSampleError("unreadable file") from None
        fields = {suffixes()[Path(name).suffix.lower()]: data}
        label = class_folder(name)
        return name, fields if label is None else {**fields, "cls": str(self._numbers[label]).encode()}

    @property
    def classes(self) -> list[str]:
        """Return the names of the class folders, in the order of their numbers."""
        return list(self._numbers)

    def set_class_numbers(self, classes: Sequence[str]) -> None:
        """Use the class numbers of another set, which must contain these classes."""
        self._numbers = {name: i for i, name in enumerate(classes)}

    def names(self) -> list[str]:
        """Return the files' paths below the folder, in order."""
        return [os.fsdecode(name) for name in self._names]

    def digest(self) -> str:
        """Return a digest of the names, and of the classes if they are not numbered in the order of their names."""
        order = [] if self.classes == sorted(self.classes) else [os.fsencode("/".join(self.classes))]
        return hashlib.sha256(b"\n".join([*self._names, *order])).hexdigest()[:16]


def open_folder(path: str | Path, key: str = "folder", mixed: bool = True) -> list[FolderPart]:
    """Return the images below a folder, in parts.

    Args:
        path: the folder.
        key: dotted key for errors.
        mixed: use a pseudo-random order of the names; False: sort them.

    Raises:
        DataError: no such folder, or no image in it.
    """
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"{key}: {root} is not a folder{remedy(root)}")
    names, left_out = list_pictures(root)
    if not names:
        others = f", got {left_out_text(left_out)}" if left_out else ""
        raise DataError(f"{key}: {root}: no readable image in this folder{others}.")
    classes = class_order(label for name in names if (label := class_folder(name)) is not None)
    if mixed:
        # Order by a hash of the name: equal on every machine, and neighbours have different classes.
        names.sort(key=lambda name: hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest())
    table = np.asarray([os.fsencode(name) for name in names])  # one block of memory, shared by forked workers
    return [
        FolderPart(f"{path}#{number}", root, table[begin : begin + _PART], classes, left_out)
        for number, begin in enumerate(range(0, len(table), _PART))
    ]


def list_pictures(root: Path) -> PictureFiles:
    """List the images below a folder, and count skipped files. Links to folders are followed, except in a cycle."""
    names: list[str] = []
    left_out: Counter[str] = Counter()
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        below, above = waiting.pop()
        place = (root / below).stat()
        if (here := (place.st_dev, place.st_ino)) in above:
            continue
        with os.scandir(root / below) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if entry.name.startswith("."):  # macOS writes `._NAME.jpg` for every image
                    continue
                if entry.is_dir():
                    waiting.append((f"{name}/", above | {here}))
                elif (suffix := Path(entry.name).suffix.lower()) in suffixes():
                    names.append(name)
                elif suffix not in _SIDECARS and entry.name.lower() not in _SYSTEM_FILES:
                    left_out[suffix or "without a suffix"] += 1
    return PictureFiles(sorted(names), dict(left_out.most_common()))


def left_out_text(left_out: Mapping[str, int]) -> str:
    """Return `2 .heic (pip install pillow-heif), 1 .mov`."""
    remedies = {".heic": " (pip install pillow-heif)", ".heif": " (pip install pillow-heif)"}
    return ", ".join(f"{count} {suffix}{remedies.get(suffix, '')}" for suffix, count in left_out.items())


def class_folder(name: str) -> str | None:
    """Return the first folder of a path below the root; None for a file next to the class folders."""
    first, slash, _ = name.partition("/")
    return first if slash else None


def class_order(names: Iterable[str]) -> list[str]:
    """Return distinct class names in the order of their labels: by number if all are integers, otherwise by name.

    Raises:
        DataError: two names are the same number, such as 1 and 01.
    """
    classes = sorted(set(names))
    if not all(re.fullmatch("[0-9]{1,18}", name) for name in classes):
        return classes
    classes.sort(key=int)
    for one, other in pairwise(classes):
        if int(one) == int(other):
            raise DataError(f"classes: {one} and {other} are the same number. Rename one of them.")
    return classes


def is_split(classes: Sequence[str]) -> bool:
    """Return whether all class folders are named like splits of a data set."""
    return all(name.lower() in _SPLITS for name in classes)


def refuse_other_order(listed: object, names: Sequence[str], classes: Sequence[str]) -> None:
    """Raise `DataError` if a list its class names are not in the order of the classes, so that each class would get another's name."""
    plain, own = ([name.replace("_", " ").casefold() for name in group] for group in (names, classes))
    if plain != own and sorted(plain) == sorted(own):
        raise DataError(
            f"{listed}: its class names are not in the order of the classes, got {names[0]!r} for the class "
            f"{classes[0]!r}. Put the lines in the same order as the classes, or remove the file."
        )


def refuse_splits(root: Path, classes: Sequence[str]) -> None:
    """Raise `DataError` if the first folders are splits, or if one contains all classes: labels and captions would be their names."""

    def below(name: str) -> int:
        return sum(entry.is_dir() and not entry.name.startswith(".") for entry in (root / name).iterdir())

    splits = [name for name in classes if name.lower() in _SPLITS]
    if splits and (len(splits) == len(classes) or len(splits) > 1) and below(splits[0]):
        first = next((name for name in splits if name.lower().startswith("train")), splits[0])
        raise DataError(f"{root}: contains splits, not classes, got {', '.join(classes)}. Give {root / first}.")
    if len(classes) == 1 and classes[0].lower() in _WRAPPERS and (count := below(classes[0])) > 1:
        raise DataError(
            f"{root}: expected one folder per class, got a single folder {classes[0]} that contains {count} folders. Give {root / classes[0]}."
        )


def _open_source(config: FolderConfig, key: str, _write_beside: bool) -> list[FolderPart]:
    """Return the images to train on, and warn if they include those of several splits."""
    parts = open_folder(config.folder, f"{key}.folder")
    splits = [name for name in parts[0].classes if name.lower() in _SPLITS]
    if len(splits) > 1:
        logger.warning(
            f"{key}.folder: uses the images of all splits ({', '.join(splits)}). To train on one of them, name its folder, such as "
            f"{Path(config.folder) / splits[0]}."
        )
    return parts


SOURCE = SourceKind(FolderConfig, _open_source)
