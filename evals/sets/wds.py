"""Sets in tar shards, clip-benchmark's `wds/` layout first of all, and images in class folders.

ROOT/test/nshards.txt  ROOT/test/0.tar …   key.jpg + key.cls | key.npy (several labels) | key.txt (captions, one per line) | key.json (pairs)
    key.mask.png (masks: an object's number per pixel; key.semantic.png: its class), key.json with `objects` (objects: positions and attributes, as CLEVR's)
ROOT/classnames.txt  ROOT/zeroshot_classification_templates.txt  ROOT/dataset_type.txt
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import read_text
from sparo_train.data.examples.samples import image_bytes
from sparo_train.data.read.folder import FolderConfig, FolderPart, refuse_splits
from sparo_train.data.read.remote import filesystem_of, remedy, with_retries
from sparo_train.data.read.shards import Shard, ShardsConfig
from sparo_train.data.read.sources import SourceConfig, Storage, open_source

from .base import IMAGE_KEYS, EvalSet, Fact, FactKind, Layout, Pair, decode_image, sha256, sizes_of
from .objects import object_rows

_KINDS_CHECKED_BY_SAMPLE = ("masks", "objects", "clips", "views")
_WITH_LABEL = "a .cls member, or a class folder"


class SourceSet(EvalSet):
    """Samples of what training can read, too.

    Raises:
        DataError: nothing there, or a truncated shard.
    """

    def __init__(self, config: SourceConfig, kind: FactKind, key: str, root: Path):
        self.source, self.kind, self.root = open_source(key, config, block=""), kind, root
        # By searching in this a sample is found without a list of millions.
        self._ends = np.cumsum([len(storage) for storage in self.source.storages])
        broken = self.source.broken()
        if broken:
            raise DataError(
                f"{broken[0].url}: {broken[0].reason}; scores over part of a data set mean nothing, fetch it again"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def at(self, number: int) -> tuple[Storage, int]:
        """Where a sample lies, and its number there."""
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return self.source.storages[shard], number - (int(self._ends[shard - 1]) if shard else 0)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        storage, ordinal = self.at(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            image = decode_image(image_bytes(fields, IMAGE_KEYS), f"{storage.url}: sample {key}")
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}; scores need every sample: repair it, or take it out"
            ) from None
        fact = FACTS[self.kind](fields, f"{storage.url}: sample {key}")
        if self.kind == "masks" and fact.shape[-2:] != (image.height, image.width):
            raise DataError(
                f"{storage.url}: sample {key}: .mask.png has {fact.shape[-1]} x {fact.shape[-2]} pixels and its image {image.width} x {image.height}"
            )
        return key, image, fact


class ShardSet(SourceSet):
    """Images in shards: a folder of them, a glob, a brace range, a URL, or their paths. Raises as above."""

    def __init__(self, shards: str | tuple[str, ...], kind: FactKind, key: str):
        first = Path(shards if isinstance(shards, str) else shards[0])
        super().__init__(ShardsConfig(shards=shards, image_keys=IMAGE_KEYS), kind, key, first)

    def identity(self) -> str:
        shards = cast(Sequence[Shard], self.source.storages)
        # An index holds every sample's place and size: two sets of equal offsets have equal members.
        return sha256("shards", self.kind, *(p for s in shards for p in (Path(s.url).name, s.index.offsets.tobytes())))

    def stamp(self) -> str:
        # A link may be another file tomorrow, so what the server says of it is asked again.
        places = [(s.url, *filesystem_of(s.url)) for s in self.source.storages]
        infos = [with_retries(url, partial(filesystem.info, path)) for url, filesystem, path in places]
        return sha256(*(f"{i['size']} {i.get('mtime', i.get('ETag', ''))}" for i in infos))


class ClassFolders(SourceSet):
    """Images in class folders, whose rank is the label. Raises as above."""

    def __init__(self, folder: str, kind: FactKind, key: str):
        super().__init__(FolderConfig(folder=folder), kind, key, Path(folder))
        self._parts = cast(Sequence[FolderPart], self.source.storages)
        self.left_out = self._parts[0].left_out
        refuse_splits(self.root, self.classes)

    @property
    def classes(self) -> list[str]:
        """Names of the class folders, by number."""
        return self._parts[0].classes

    def number_by(self, classes: Sequence[str]) -> None:
        """Take the numbers of another set's class folders."""
        for part in self._parts:
            part.set_class_numbers(classes)

    def identity(self) -> str:
        return sha256("folder", *self.classes, *self._names(), self._stat[0])

    def stamp(self) -> str:
        return sha256(self._stat[1])

    def _names(self) -> list[str]:
        return [name for part in self._parts for name in part.names()]

    @cached_property
    def _stat(self) -> tuple[bytes, bytes]:
        return sizes_of([self.root / name for name in self._names()])


def open_images(place: str, kind: FactKind, key: str) -> ShardSet | ClassFolders:
    """What lies there: a folder without a tar is one of class folders (clip-benchmark's layout has both); `key` is what errors call it."""
    folder = Path(place)
    as_folder = folder.is_dir() and not any(folder.glob("*.tar"))
    return ClassFolders(place, kind, key) if as_folder else ShardSet(place, kind, key)


class WdsSet(ShardSet):
    """A folder in the layout above. Raises `DataError` where files are missing, which it names."""

    def __init__(self, root: str | Path, kind: FactKind, split: str = "test"):
        folder = Path(root)
        counter = folder / split / "nshards.txt"
        if not counter.is_file():
            raise DataError(
                f"{counter}: missing; an evaluation set has {split}/nshards.txt and {split}/0.tar …{remedy(counter)}"
            )
        try:
            number = int(read_text(counter, DataError, 4096))
        except ValueError:
            raise DataError(f"{counter}: must hold the number of shards, nothing else") from None
        # Before as many names are made.
        if not 0 < number <= 1_000_000:
            raise DataError(f"{counter}: {number} shards cannot be; it counts the .tar files beside it")
        shards = [folder / split / f"{i}.tar" for i in range(number)]
        for path in shards:
            if not path.is_file():
                raise DataError(f"{path}: missing; {counter} names {number} shard(s)")
        declared = _declared(folder)
        super().__init__(
            tuple(map(str, shards)),
            "labels" if kind == "label" and declared == "multilabel" else kind,
            str(counter.parent),
        )
        self.root = folder

    def check(self) -> None:
        super().check()
        # A set of another kind, or without what is scored, is told by its first sample: not behind an hour of training.
        if self.kind in _KINDS_CHECKED_BY_SAMPLE:
            self.read(0)

    def identity(self) -> str:
        return sha256("wds", super().identity())


def _declared(root: Path) -> str:
    path = root / "dataset_type.txt"
    return read_text(path, DataError, 4096).strip() if path.is_file() else ""


def _label(fields: dict[str, bytes], where: str) -> int:
    text = fields.get("cls", b"").strip()
    # Of bytes: ASCII's digits alone.
    if not text.isdigit():
        raise DataError(f"{where} has no label ({_WITH_LABEL})")
    # Probes make an output for every class up to the highest label: an id in its place would take all memory.
    if len(text.lstrip(b"0")) > 6:
        raise DataError(
            f"{where} has label {text[:40].decode()}; labels number classes from 0, and are below 1,000,000"
        )
    return int(text)


def _labels(fields: dict[str, bytes], where: str) -> list[int]:
    if "npy" not in fields:
        raise DataError(f"{where} has no .npy member, which holds the labels of a multilabel set")
    try:
        table = np.load(io.BytesIO(fields["npy"]), allow_pickle=False)
    except Exception:  # a damaged header raises anything
        raise DataError(f"{where}: .npy cannot be read as an array of numbers") from None
    if table.ndim != 1 or not np.isin(table, (0, 1)).all():
        raise DataError(f"{where}: .npy must hold one row of zeros and ones, one per class")
    return table.astype(int).tolist()


def _captions(fields: dict[str, bytes], where: str) -> list[str]:
    """One per line, an empty line, too: clip-benchmark has it as a caption. None of them is an answer: such images are counted."""
    try:
        text = fields.get("txt", b"").decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{where}: .txt is not UTF-8") from None
    return text.splitlines()


def _pairs(fields: dict[str, bytes], where: str) -> list[Pair]:
    try:
        item = json.loads(fields["json"])
        pair = Pair(item["kind"], item["caption"], item["negative_caption"])
        if not all(isinstance(text, str) for text in pair):
            raise TypeError("one of them is no text")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: .json needs kind, caption, negative_caption ({error})") from None
    return [pair]


def _mask(fields: dict[str, bytes], where: str) -> np.ndarray:
    """(H, W), an object's number per pixel, 0 for the background; with `.semantic.png` (2, H, W), a class per pixel behind it."""
    if "mask.png" not in fields:
        raise DataError(f"{where} has no .mask.png member, which holds an object's number per pixel")
    table = _labels_of(fields, "mask.png", where)
    if "semantic.png" not in fields:
        return table
    classes = _labels_of(fields, "semantic.png", where)
    if classes.shape != table.shape:
        raise DataError(f"{where}: .semantic.png has {classes.shape[::-1]} pixels and .mask.png {table.shape[::-1]}")
    return np.stack([table, classes]).astype(np.promote_types(table.dtype, classes.dtype))


def _labels_of(fields: dict[str, bytes], name: str, where: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(fields[name]), formats=("PNG",)) as image:
            table = np.asarray(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: .{name} cannot be read ({error})") from None
    if table.ndim != 2:
        raise DataError(f"{where}: .{name} has {table.shape[2:]} channels; it must hold one number per pixel")
    return table


def _objects(fields: dict[str, bytes], where: str) -> np.ndarray:
    """(n, WIDTH) of evals/sets/objects.py."""
    if "json" not in fields:
        raise DataError(f"{where} has no .json member, which holds the scene's objects")
    try:
        return object_rows(fields["json"])
    except BadSampleError as bad:
        raise DataError(f"{where}: {bad}") from None


FACTS: dict[FactKind, Callable[[dict[str, bytes], str], Fact]] = {
    "label": _label,
    "labels": _labels,
    "captions": _captions,
    "pairs": _pairs,
    "masks": _mask,
    "objects": _objects,
}


LAYOUT = Layout(tuple(FACTS), lambda config, kind, split: WdsSet(config.root, kind, split))
