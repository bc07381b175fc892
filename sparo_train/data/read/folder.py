"""Image folders, `CLASS/…/name.jpg` as torchvision's ImageFolder has them, read by position like shards.

Files are put in an order that only their names decide and that mixes the classes, then cut into parts of 1,000: the
plan treats a part as a shard.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from ...core.config import free, setting
from ...core.errors import BadSampleError, DataError
from ...core.untrusted import read_bytes
from .made_by import remedy
from .sources import SourceConfig, SourceKind
from .storage import Storage

# torchvision's; an image is decoded by its content, so that the rarer kinds need no name of their own.
IMAGE_SUFFIXES = {
    ".jpg": "jpg", ".jpeg": "jpg", ".png": "png", ".webp": "webp",
    ".bmp": "png", ".tif": "png", ".tiff": "png", ".ppm": "png", ".pgm": "png",
}  # fmt: skip
_PART = 1000


class FolderConfig(SourceConfig):
    """Images in class folders or not, for objectives that read no captions."""

    kind: Literal["folder"] = setting("folder", "a row of sparo.sources")
    folder: str = free(..., "images, or folders of them, one per class: imagenet/train")
    has_captions: ClassVar[bool] = False


class FolderPart(Storage):
    """Some files of an image folder. A sample has the image, by its suffix, and `cls`, the class's number, where there are classes."""

    def __init__(self, url: str, root: Path, names: np.ndarray, classes: list[str]):
        self.url, self.root, self._names, self._numbers = url, root, names, {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self._names)

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Key and fields of a file. Raises `BadSampleError` where it cannot be read."""
        name = os.fsdecode(self._names[number])
        try:
            data = read_bytes(self.root / name, DataError)
        except DataError:
            raise BadSampleError("unreadable file") from None
        fields = {IMAGE_SUFFIXES[Path(name).suffix.lower()]: data}
        first, slash, _ = name.partition("/")
        return name, {**fields, "cls": str(self._numbers[first]).encode()} if slash else fields

    @property
    def classes(self) -> list[str]:
        """Names of the class folders, in the order of their numbers."""
        return list(self._numbers)

    def number_by(self, classes: Sequence[str]) -> None:
        """Take the numbers of another set's classes, of which these have to be some."""
        self._numbers = {name: i for i, name in enumerate(classes)}

    def names(self) -> list[str]:
        """The files' paths below the folder, in order."""
        return [os.fsdecode(name) for name in self._names]

    def digest(self) -> str:
        """Of the names."""
        return hashlib.sha256(b"\n".join(self._names)).hexdigest()[:16]


def open_folder(path: str | Path, key: str = "folder", mixed: bool = True) -> list[FolderPart]:
    """The images below a folder, in parts.

    Args:
        mixed: in a pseudo-random order of the names; false sorts them.

    Raises:
        DataError: no such folder, or no image in it; `key` is named.
    """
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"{key}: {root} is no folder{remedy(root)}")
    # A directory lists its files in an order of its own.
    names = sorted(_images(root, ""))
    if not names:
        raise DataError(f"{key}: {root} holds no {', '.join(sorted(set(IMAGE_SUFFIXES)))} image")
    classes = sorted({name.partition("/")[0] for name in names if "/" in name})
    if mixed:
        # By a hash of the name: the same on every machine, and neighbours are of different classes.
        names.sort(key=lambda name: hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest())
    table = np.asarray([os.fsencode(name) for name in names])  # one block of memory, which forked workers share
    return [
        FolderPart(f"{path}#{number}", root, table[begin : begin + _PART], classes)
        for number, begin in enumerate(range(0, len(table), _PART))
    ]


def _images(root: Path, below: str) -> Iterator[str]:
    with os.scandir(root / below) as entries:
        for entry in entries:
            name = f"{below}{entry.name}"
            if entry.is_dir():
                yield from _images(root, f"{name}/")
            # A link to a folder is one, too; macOS leaves `._NAME.jpg` beside every picture.
            elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith("."):
                yield name


SOURCE = SourceKind(FolderConfig, lambda config, key, _write_beside: open_folder(config.folder, f"{key}.folder"))
