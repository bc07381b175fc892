"""Sets in tar shards, foremost clip-benchmark's `wds/` layout, and images in class folders.

ROOT/test/nshards.txt  ROOT/test/0.tar …   key.jpg + key.cls | key.npy (several labels, or numbers of `metadata`) | key.txt (captions, one per
line) | key.json (pairs)
    key.mask.png (masks: object number per pixel; key.semantic.png: its class), key.json with `objects` (positions and
    attributes, as in CLEVR)
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
from sparo_train.data.decode.decoding import refuse_unclear_rotation
from sparo_train.data.examples.samples import image_bytes
from sparo_train.data.servers.remote import open_filesystem, remedy, version_stamp, with_retries
from sparo_train.data.sources.base import SourceConfig, Storage, open_source
from sparo_train.data.sources.folder import FolderConfig, FolderPart, refuse_splits
from sparo_train.data.sources.shards import Shard, ShardsConfig

from .base import IMAGE_KEYS, EvalSet, Fact, FactKind, Layout, Pair, sha256, stat_files
from .objects import object_rows
from .pictures import decode_image, label_image

_KINDS_CHECKED_BY_SAMPLE = ("metadata", "masks", "objects", "clips", "views")
_WITH_LABEL = "a .cls member, or a class folder"


class SourceSet(EvalSet):
    """Samples in a format that training can read, too.

    Raises:
        DataError: nothing there, or a truncated shard.
    """

    def __init__(self, config: SourceConfig, kind: FactKind, key: str, root: Path):
        self.source, self.kind, self.root = open_source(key, config, block=""), kind, root
        # Binary search, so that no list of millions of samples is needed.
        self._ends = np.cumsum([len(storage) for storage in self.source.storages])
        broken = self.source.incomplete_storages()
        if broken:
            raise DataError(
                f"{broken[0].url}: {broken[0].reason}. Fetch it again; a score on part of a data set is not comparable."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, number: int) -> tuple[Storage, int]:
        """Return the storage of a sample, and its number there."""
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return self.source.storages[shard], number - (int(self._ends[shard - 1]) if shard else 0)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        storage, ordinal = self.locate(number)
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            data = image_bytes(fields, IMAGE_KEYS)
            image = decode_image(data, f"{storage.url}: sample {key}", own=not self.published)
            if self.kind == "masks" and not self.published:
                refuse_unclear_rotation(data)
        except BadSampleError as bad:
            raise DataError(
                f"{storage.url}: sample {key}: {bad}. Scoring skips no sample. Repair this one, or remove it from the set."
            ) from None
        fact = FACTS[self.kind](fields, f"{storage.url}: sample {key}")
        if self.kind == "masks" and fact.shape[-2:] != (image.height, image.width):
            raise DataError(
                f"{storage.url}: sample {key}: .mask.png has {fact.shape[-1]} x {fact.shape[-2]} pixels, but its image {image.width} x {image.height}"
            )
        return key, image, fact


class ShardSet(SourceSet):
    """Images in shards: a folder, a glob, a brace range, a URL, or their paths. Raises like `SourceSet`."""

    def __init__(self, shards: str | tuple[str, ...], kind: FactKind, key: str):
        first = Path(shards if isinstance(shards, str) else shards[0])
        super().__init__(ShardsConfig(shards=shards, image_keys=IMAGE_KEYS), kind, key, first)

    def identity(self) -> str:
        shards = cast(Sequence[Shard], self.source.storages)
        # The index contains every sample's position and size: two sets with equal offsets have equal members.
        return sha256("shards", self.kind, *(p for s in shards for p in (Path(s.url).name, s.index.offsets.tobytes())))

    def stamp(self) -> str:
        # A link may refer to another file tomorrow, so ask the server again.
        places = [(s.url, *open_filesystem(s.url)) for s in self.source.storages]
        infos = [with_retries(url, partial(filesystem.info, path)) for url, filesystem, path in places]
        return sha256(*(f"{i['size']} {version_stamp(i)}" for i in infos))


class ClassFolders(SourceSet):
    """Images in class folders, whose rank is the label. Raises like `SourceSet`."""

    def __init__(self, folder: str, kind: FactKind, key: str):
        super().__init__(FolderConfig(folder=folder), kind, key, Path(folder))
        self._parts = cast(Sequence[FolderPart], self.source.storages)
        self._numbered: Sequence[str] = self.classes
        self.left_out = self._parts[0].left_out
        refuse_splits(self.root, self.classes)

    @property
    def classes(self) -> list[str]:
        """Return the names of the class folders, by number."""
        return self._parts[0].classes

    def number_by(self, classes: Sequence[str]) -> None:
        """Use the numbers of another set's class folders."""
        self._numbered = classes
        for part in self._parts:
            part.set_class_numbers(classes)

    def own_classnames(self) -> list[str]:
        return list(self._numbered)

    def identity(self) -> str:
        return sha256("folder", *self.classes, *self._names(), self._stat[0])

    def stamp(self) -> str:
        return sha256(self._stat[1])

    def _names(self) -> list[str]:
        return [name for part in self._parts for name in part.names()]

    @cached_property
    def _stat(self) -> tuple[bytes, bytes]:
        return stat_files([self.root / name for name in self._names()])


def open_images(place: str, kind: FactKind, key: str) -> ShardSet | ClassFolders:
    """Open the images at a path: a folder without tars consists of class folders (clip-benchmark's layout has both); `key` names it in errors."""
    folder = Path(place)
    as_folder = folder.is_dir() and not any(folder.glob("*.tar"))
    return ClassFolders(place, kind, key) if as_folder else ShardSet(place, kind, key)


class WdsSet(ShardSet):
    """A folder in the layout above. Raises `DataError` naming missing files."""

    def __init__(self, root: str | Path, kind: FactKind, split: str = "test"):
        folder = Path(root)
        counter = folder / split / "nshards.txt"
        if not counter.is_file():
            raise DataError(
                f"{counter}: missing. An evaluation set has the files {split}/nshards.txt, {split}/0.tar, …{remedy(counter)}"
            )
        try:
            number = int(read_text(counter, DataError, 4096))
        except ValueError:
            raise DataError(f"{counter}: must contain the number of shards only") from None
        # Before generating that many names.
        if not 0 < number <= 1_000_000:
            raise DataError(f"{counter}: must contain the number of .tar files in this folder, got {number}")
        shards = [folder / split / f"{i}.tar" for i in range(number)]
        for path in shards:
            if not path.is_file():
                raise DataError(f"{path}: missing, but {counter} lists {number} shard(s)")
        declared = _read_dataset_type(folder)
        super().__init__(
            tuple(map(str, shards)),
            "labels" if kind == "label" and declared == "multilabel" else kind,
            str(counter.parent),
        )
        self.root = folder

    def check(self) -> None:
        super().check()
        # Check the first sample for the required members now, instead of after an hour of training.
        if self.kind in _KINDS_CHECKED_BY_SAMPLE:
            self.read(0)

    def identity(self) -> str:
        return sha256("wds", super().identity())


def _read_dataset_type(root: Path) -> str:
    path = root / "dataset_type.txt"
    return read_text(path, DataError, 4096).strip() if path.is_file() else ""


def _label(fields: dict[str, bytes], where: str) -> int:
    text = fields.get("cls", b"").strip()
    # On bytes, for ASCII digits only.
    if not text.isdigit():
        raise DataError(f"{where} has no label ({_WITH_LABEL})")
    # Probes have an output for every class up to the highest label: an id instead of a label would use all memory.
    if len(text.lstrip(b"0")) > 6:
        raise DataError(f"{where} has label {text[:40].decode()}; labels must be class numbers from 0 to 999,999")
    return int(text)


def _labels(fields: dict[str, bytes], where: str) -> list[int]:
    if "npy" not in fields:
        raise DataError(f"{where} lacks the .npy member with its labels, which every sample of a multilabel set needs")
    table = _array(fields["npy"], where)
    if table.ndim != 1 or not np.isin(table, (0, 1)).all():
        raise DataError(f"{where}: .npy must hold a single row, with a 0 or 1 for each class")
    return table.astype(int).tolist()


def _array(data: bytes, where: str) -> np.ndarray:
    try:
        table = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:  # a damaged header may raise anything
        table = None
    if not isinstance(table, np.ndarray):  # an archive of several arrays is not one
        raise DataError(f"{where}: .npy cannot be read as an array of numbers")
    return table


def _metadata(fields: dict[str, bytes], where: str) -> list[int]:
    """Return the class (-1 without a .cls member) and the whole numbers of the .npy member, as in DataComp's sets of WILDS."""
    if "npy" not in fields:
        raise DataError(
            f"{where} has no .npy member; the WILDS data sets of DataComp store the values of `metadata` in a .npy member"
        )
    table = _array(fields["npy"], where)
    if table.ndim != 1 or table.dtype.kind not in "iub":
        raise DataError(
            f"{where}: .npy must hold one row of whole numbers, got shape {table.shape} and dtype {table.dtype}"
        )
    return [_label(fields, where) if "cls" in fields else -1, *table.astype(int).tolist()]


def _captions(fields: dict[str, bytes], where: str) -> list[str]:
    """Return one caption per line, including empty lines, like clip-benchmark. An image without captions is counted."""
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
            raise TypeError("a value is not a string")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: .json needs the texts `kind`, `caption` and `negative_caption` ({error})") from None
    return [pair]


def _mask(fields: dict[str, bytes], where: str) -> np.ndarray:
    """Return (H, W), object number per pixel, 0 for the background; with `.semantic.png` (2, H, W), the class per pixel second."""
    if "mask.png" not in fields:
        raise DataError(f"{where} has no .mask.png member with the object number per pixel")
    table = label_image(fields["mask.png"], f"{where}: .mask.png")
    if "semantic.png" not in fields:
        return table
    classes = label_image(fields["semantic.png"], f"{where}: .semantic.png")
    if classes.shape != table.shape:
        raise DataError(f"{where}: .semantic.png has {classes.shape[::-1]} pixels, but .mask.png {table.shape[::-1]}")
    return np.stack([table, classes]).astype(np.promote_types(table.dtype, classes.dtype))


def _objects(fields: dict[str, bytes], where: str) -> np.ndarray:
    """Return (n, WIDTH) rows of evals/sets/objects.py."""
    if "json" not in fields:
        raise DataError(f"{where} has no .json member with the scene's objects")
    try:
        return object_rows(fields["json"])
    except BadSampleError as bad:
        raise DataError(f"{where}: {bad}") from None


FACTS: dict[FactKind, Callable[[dict[str, bytes], str], Fact]] = {
    "images": lambda _fields, _where: None,
    "label": _label,
    "labels": _labels,
    "metadata": _metadata,
    "captions": _captions,
    "pairs": _pairs,
    "masks": _mask,
    "objects": _objects,
}


LAYOUT = Layout(tuple(FACTS), lambda config, kind, split: WdsSet(config.root, kind, split))
