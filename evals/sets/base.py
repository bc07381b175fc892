"""Base class of evaluation sets: images by number with keys and annotations, read in batches; class names and prompt templates."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import read_text
from sparo_train.core.world import stop_here
from sparo_train.data.read.workers import WorkerItems
from sparo_train.data.sources.folder import refuse_other_order

from .pictures import NEEDS_ALL

OWN = {"classnames": "classnames.txt", "templates": "zeroshot_classification_templates.txt"}
_PUBLISHED = {"classnames": "en_classnames.json", "templates": "en_zeroshot_classification_templates.json"}


def read_set_texts(what: str, root: Path, benchmark_name: str | None) -> list[str] | None:
    """Return `classnames` or `templates` of the set in `root`; None if neither the folder nor clip-benchmark has them."""
    if (root / OWN[what]).is_file():
        return lines(root / OWN[what])
    return published(what, benchmark_name) if benchmark_name else None


def lines(path: Path) -> list[str]:
    """Return the lines of a text file, stripped, without blank ones, as clip-benchmark reads them. Raises `DataError` if it is missing."""
    if not path.is_file():
        raise DataError(f"{path}: no such file, but this task needs it. Write the file with one entry per line.")
    return [line.strip() for line in read_text(path, DataError).split("\n") if line.strip()]


def published(what: str, name: str) -> list[str] | None:
    """Return the texts by clip-benchmark's name (`vtab/pets`); None if it has none or is not installed."""
    spec = importlib.util.find_spec("clip_benchmark")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "datasets" / _PUBLISHED[what]
    if not path.is_file():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    short = name.rpartition("/")[2]  # clip-benchmark, too, drops the collection's name if the whole name is unknown
    # VTAB numbers Caltech-101's classes in another order than torchvision.
    entries = table.get(name) or table.get(f"{short}_vtab" if name.startswith("vtab/") else "") or table.get(short)
    if entries is None and what == "templates":
        entries = table.get("imagenet1k")  # clip-benchmark's default for sets without prompts
    return [str(entry) for entry in entries] if isinstance(entries, list) else None


IMAGE_KEYS = ("webp", "png", "jpg", "jpeg")
Transform = Callable[[Image.Image], np.ndarray]  # an image to (S, S, 3) uint8
_FEW = 256  # images that are read before workers would have started
FactKind = str  # label, labels, captions, pairs, questions, masks, objects, or a layout's own kind
Fact = Any  # int | list[int] of 0 and 1 | list[str] | list[Pair] | an array: (H, W) of object numbers, (2, H, W) with classes, (n, WIDTH) of objects; by kind


class Pair(NamedTuple):
    """A true and a false caption of an image; `kind` is the split or category, `key` its name there."""

    kind: str
    caption: str
    negative_caption: str
    key: str = ""


class Layout(NamedTuple):
    """Entry of `sparo.layouts`. `kinds`: annotations that it may contain. `open`: (a task's config, the kind it needs, the split) to the set."""

    kinds: tuple[FactKind, ...]
    open: Callable[[Any, FactKind, str], EvalSet]


class EvalSet(ABC):
    """Images by number, in a fixed order.

    Attributes:
        root: location, for errors.
        kind: kind of the annotations.
        home: folder of the files with class names and prompts (default: root).
        benchmark_name: clip-benchmark's name of the set, for files that `home` lacks.
        published: images are decoded as by open_clip, without EXIF orientation and white behind transparent pixels, instead of
            as in training.
        groups: group of each image (patient, slide), whose images must not help each other's score; None: unknown.
        part_of: the set that this is a part of, if `limit` shortened it.
    """

    root: Path
    kind: FactKind
    home: Path | None = None
    benchmark_name: str | None = None
    published: bool = False
    left_out: Mapping[str, int] = {}
    groups: Sequence[str] | None = None
    part_of: EvalSet | None = None
    label_below: int | None = None  # larger labels are refused when they are read, not after encoding everything

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        """Return key, RGB image and annotation. Raises `DataError` if one is missing or damaged, because scores need all samples."""

    def __iter__(self) -> Iterator[tuple[str, Image.Image, Fact]]:
        """Yield all samples, in order, as `read` returns them."""
        return map(self.read, range(len(self)))

    @abstractmethod
    def identity(self) -> str:
        """Return the hex SHA-256 over names, byte sizes and annotations, which is equal on every machine with the same files."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a value that changes when one of its files is written again on this machine."""

    def classnames(self) -> list[str]:
        """Return one name per label: from a file in `home`, otherwise clip-benchmark's, otherwise the set's own. Raises `DataError` without any."""
        home, own = self.home or self.root, self.own_classnames()
        names = read_set_texts("classnames", home, self.benchmark_name) or own or lines(home / OWN["classnames"])
        if own and len(names) != len(own):  # folders are numbered by their order, names by their lines
            raise DataError(
                f"{home}: has {len(own)} class folders but {len(names)} class names, so labels would have wrong names"
            )
        if own:
            refuse_other_order(home / OWN["classnames"], names, own)
        return names

    def own_classnames(self) -> list[str]:
        """Return the data's own class names, if it has any."""
        return []

    def templates(self) -> list[str]:
        """Return prompts with `{c}` for the class name. Raises `DataError` if those of a known set are not available."""
        home = self.home or self.root
        prompts = read_set_texts("templates", home, self.benchmark_name)
        if prompts is None and self.benchmark_name:
            raise DataError(
                f"{home / OWN['templates']}: missing. Install clip-benchmark, which contains the prompts for {self.benchmark_name}, or write the file."
            )
        prompts = prompts or ["a photo of a {c}."]
        if bad := [template for template in prompts if "{c}" not in template]:
            raise DataError(f"{home / OWN['templates']}: {bad[0]!r} has no {{c}}, which stands for the class name")
        return prompts

    def check(self) -> None:
        """Raise `DataError` before scoring if a required file is missing."""
        self.stamp()

    def limit_to(self, count: int) -> EvalSet:
        """Return about `count` samples, evenly spaced."""
        return Limited(self, count)


def evenly(total: int, count: int) -> list[int]:
    """Return at most `count` different numbers below `total`, evenly spaced from 0."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


class Limited(EvalSet):
    """At most `count` samples of a set, evenly spaced, so that all of consecutive classes are included."""

    def __init__(self, whole: EvalSet, count: int):
        self.whole, self.root, self.kind, self.benchmark_name = whole, whole.root, whole.kind, whole.benchmark_name
        self.part_of, self.left_out, self.published = whole, whole.left_out, whole.published
        self._numbers = evenly(len(whole), count)
        self.groups = None if whole.groups is None else [whole.groups[number] for number in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        return self.whole.read(self._numbers[number])

    def identity(self) -> str:
        # Not the word of older versions, which repeated the first samples if the limit exceeded the set's size.
        return sha256(self.whole.identity(), f"{len(self)} evenly spaced")

    def stamp(self) -> str:
        return self.whole.stamp()

    def classnames(self) -> list[str]:
        return self.whole.classnames()

    def own_classnames(self) -> list[str]:
        return self.whole.own_classnames()

    def templates(self) -> list[str]:
        return self.whole.templates()

    def check(self) -> None:
        self.whole.check()


class ImageBatch(NamedTuple):
    """Pixels (b, 3, S, S) uint8, keys and annotations of consecutive samples."""

    pixels: Tensor
    keys: list[str]
    facts: list[Fact]


def read_batches(
    source: EvalSet, transform: Transform, numbers: Sequence[Sequence[int]], workers: int, stoppable: bool = True
) -> Generator[ImageBatch, None, None]:
    """Yield these samples, batch by batch and in order.

    Args:
        source, transform, numbers, workers: the set, the preprocessing, the samples, and the number of processes.
        stoppable: False if other ranks would keep waiting for this one.

    Raises:
        DataError: like `source.read`.
        StoppedError: a signal asked the run to stop.
    """
    # Starting processes takes longer than reading so few samples.
    few = sum(map(len, numbers)) < _FEW
    with closing(WorkerItems(_Samples(source, transform), 0 if few else workers, _collate, numbers)) as batches:
        for batch in batches:
            if stoppable:
                stop_here()  # a signal must not wait for a whole set
            yield batch


class _Samples(Dataset[Any]):
    """Samples whose errors are returned instead of raised, because torch would bury the message in a worker's traceback."""

    def __init__(self, source: EvalSet, transform: Transform):
        self.source, self.transform = source, transform

    def __getitem__(self, number: int) -> tuple[np.ndarray, str, Fact] | DataError:
        try:
            key, image, fact = self.source.read(number)
            refuse_label(self.source, key, fact)
        except DataError as error:
            return error
        try:
            return np.asarray(self.transform(image)), key, fact
        except DataError as error:
            return error
        except BadSampleError as bad:  # pixels that cannot be mapped to 8 bits
            return DataError(f"{self.source.root}: {key}: {bad.full_message()}{NEEDS_ALL}")


def refuse_label(source: EvalSet, key: str, fact: Fact) -> None:
    """Raise `DataError` if a sample's label is not a class."""
    if (below := source.label_below) is None:
        return
    fact = fact[0] if source.kind == "metadata" else fact
    if isinstance(fact, list) and len(fact) != below:
        raise DataError(f"{source.root}: {key} has a row of {len(fact)} labels, but there are {below} classes")
    if isinstance(fact, int) and not 0 <= fact < below:
        raise DataError(f"{source.root}: {key} has label {fact}, but there are {below} classes")


def _collate(rows: list[Any]) -> ImageBatch | DataError:
    for row in rows:
        if isinstance(row, DataError):
            return row
    # Before torch raises an error that names neither file nor sample.
    sizes = {row[0].shape for row in rows}
    if len(sizes) > 1:
        return DataError(
            f"{rows[0][1]} … {rows[-1][1]}: samples have unequal sizes ({', '.join(map(str, sorted(sizes)))})"
        )
    # Channels before height and width, after any other dimension: images are (b, 3, S, S), clips (b, T, 3, S, S).
    pixels = torch.from_numpy(np.stack([row[0] for row in rows])).movedim(-1, -3)
    return ImageBatch(pixels, [row[1] for row in rows], [row[2] for row in rows])


def split_batches(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cut into batches; the last one may be smaller."""
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def sha256(*parts: str | bytes) -> str:
    """Return the hex digest of several parts with separators."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # Include lengths, because "ab", "c" and "a", "bc" are different.
        digest.update(f"{len(data)}\n".encode() + data)
    return digest.hexdigest()


def stat_files(paths: Sequence[Path]) -> tuple[bytes, bytes]:
    """Return byte sizes and modification times of local files. Raises `DataError` naming the first that is missing."""
    sizes, times = np.zeros(len(paths), np.int64), np.zeros(len(paths), np.int64)
    for i, path in enumerate(paths):
        try:
            stat = path.stat()
        except OSError:
            # Count only now: one missing file is as bad as all, but needs another remedy.
            missing = sum(not p.is_file() for p in paths)
            raise DataError(
                f"{path}: missing; in all, {missing} of {len(paths)} files are missing, and a score needs every image"
            ) from None
        sizes[i], times[i] = stat.st_size, stat.st_mtime_ns
    return sizes.tobytes(), times.tobytes()
