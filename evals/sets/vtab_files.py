"""VTAB's sets in their authors' own files, with the test images of VTAB: EuroSAT, RESISC45, dSprites, smallNORB, KITTI.

The splits are those of TensorFlow Datasets 4.2 and later; before, the order of EuroSAT and RESISC45 depended on the
folder of whoever prepared them.
"""

from __future__ import annotations

import gzip
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from sparo_train.core.errors import DataError
from sparo_train.core.files import read_text

from .base import EvalSet, Fact, lines, sha256, stat_files
from .image_files import FileSet
from .tfds_set import SPECS, RecordSet, absent_error, md5_order, record_files, select_split, vehicle_class

_DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
_LATENTS = {"vtab/dsprites_label_orientation": 3, "vtab/dsprites_label_x_position": 4}  # columns of latents_classes
_NORB = {"test": "smallnorb-5x01235x9x18x6x2x96x96-testing", "train": "smallnorb-5x46789x9x18x6x2x96x96-training"}
_NORB_KINDS = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}  # magic numbers of the NORB file format
_KITTI_TYPES = ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc")
_FOLDERS = {"vtab/eurosat": ("2750", "EuroSAT/2750", "EuroSAT"), "vtab/resisc45": ("NWPU-RESISC45", "RESISC45")}
_ROWS = 4096  # images that are unpacked at once


def open_vtab(root: Path, name: str, split: str) -> EvalSet:
    """Open a split of VTAB from record files of TensorFlow Datasets, otherwise from the authors' files.

    Raises:
        DataError: neither exists, or a file is damaged.
    """
    records = select_split(SPECS[name], split, root).records
    if files := record_files(root, SPECS[name].builder, records):
        return RecordSet(root, name, split, files)
    if name in _FOLDERS:
        return _class_folders(root, name, split)
    if name in _LATENTS:
        return ArraySet(root, name, split, _dsprites(root, name))
    if name.startswith("vtab/smallnorb"):
        return ArraySet(root, name, split, _smallnorb(root, name, records))
    if name.startswith("vtab/kitti"):
        return _kitti(root, split)
    # Their test images cannot be derived from the authors' files: an order of files, or an image filter, is missing.
    raise absent_error(root, name, "any other form that VTAB's split can be derived from")


def _part(name: str, split: str, keys: Sequence[str], root: Path) -> list[int]:
    """Return the numbers of a split's examples, in its order, among those with these names."""
    part = select_split(SPECS[name], split, root)
    begin, end = part.bounds(len(keys))
    return md5_order(part.records, keys)[begin:end]


def _class_folders(root: Path, name: str, split: str) -> FileSet:
    top = next((root / folder for folder in _FOLDERS[name] if (root / folder).is_dir()), root)
    paths = sorted(path for path in top.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise absent_error(root, name, f"{_FOLDERS[name][0]}/CLASS/*.jpg")
    classes = sorted({path.parent.name for path in paths})
    keys = [f"{path.parent.name}_{path.name}" for path in paths]
    chosen = [paths[i] for i in _part(name, split, keys, root)]
    labels = [classes.index(path.parent.name) for path in chosen]
    return NamedFiles(top, [path.relative_to(top).as_posix() for path in chosen], labels, "label", classes=classes)


class NamedFiles(FileSet):
    """Image files with class names."""

    def __init__(self, *args: Any, classes: Sequence[str], **more: Any):
        super().__init__(*args, **more)
        self._classes = list(classes)

    def own_classnames(self) -> list[str]:
        return self._classes


class Table(NamedTuple):
    """Gray images in one large file, which is read from its beginning to its end.

    Attributes:
        paths: the files; the first one has the images.
        labels: (n,) int64, the class of each image.
        blocks: yields (b, H, W) uint8 of the first file, in order.
    """

    paths: Sequence[Path]
    labels: np.ndarray
    blocks: Callable[[Path], Iterator[np.ndarray]]


class ArraySet(EvalSet):
    """A split of VTAB in one large array; its images are kept in memory, packed if they are black and white."""

    kind = "label"

    def __init__(self, root: Path, name: str, split: str, table: Table):
        self.root, self._name, self._table = root, name, table
        self._numbers = _part(name, split, [str(i) for i in range(len(table.labels))], root)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        row = self._numbers[number]
        image = self._images[number]
        return f"{row:06d}", Image.fromarray(image * np.uint8(SPECS[self._name].scale)), int(self._table.labels[row])

    @cached_property
    def _images(self) -> np.ndarray:
        """Return (n, H, W) uint8 of the split."""
        place = np.full(len(self._table.labels), -1)
        place[self._numbers] = np.arange(len(self._numbers))
        images: np.ndarray | None = None
        first = 0
        for block in self._table.blocks(self._table.paths[0]):
            here = place[first : first + len(block)]
            first += len(block)
            if len(here) < len(block):
                break
            images = np.empty((len(self._numbers), *block.shape[1:]), np.uint8) if images is None else images
            images[here[here >= 0]] = block[here >= 0]
        if images is None or first != len(place):
            raise DataError(
                f"{self._table.paths[0]}: its number of images differs from the number of labels ({len(place)}). Download the data set again."
            )
        return images

    def identity(self) -> str:
        names = [path.name for path in self._table.paths]
        return sha256(
            "array", self._name, str(names), str(self._numbers[:16]), str(len(self)), stat_files(self._table.paths)[0]
        )

    def stamp(self) -> str:
        return sha256(stat_files(self._table.paths)[1])

    def own_classnames(self) -> list[str]:
        return [str(number) for number in range(SPECS[self._name].classes)]


def _dsprites_blocks(path: Path) -> Iterator[np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as stream:
            np.lib.format.read_magic(stream)  # type: ignore[arg-type]
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)  # type: ignore[arg-type]
            if dtype != np.uint8 or len(shape) != 3:
                raise ValueError(f"expected uint8 images (N, H, W), got {dtype} {shape}")
            size = shape[1] * shape[2]
            # 3 GB unpacked, so never at once.
            while data := stream.read(_ROWS * size):
                yield np.frombuffer(data, np.uint8).reshape(-1, *shape[1:])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: is damaged ({error}). Fetch it again.") from None


def _dsprites(root: Path, name: str) -> Table:
    path = root / _DSPRITES
    if not path.is_file():
        raise absent_error(root, name, _DSPRITES)
    try:
        with np.load(path, allow_pickle=False) as archive:
            latents = archive["latents_classes"]
        return Table([path], latents[:, _LATENTS[name]].astype(np.int64), _dsprites_blocks)
    except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: is damaged ({error}). Fetch it again.") from None


def _norb_blocks(path: Path) -> Iterator[np.ndarray]:
    with _norb_stream(path) as stream:
        shape, kind = _norb_header(stream, path)
        if len(shape) != 4 or kind != np.uint8:
            raise DataError(f"{path}: is not an image file of smallNORB, got {kind} {shape}. Fetch it again.")
        size = int(np.prod(shape[1:]))
        while data := _read(stream, 64 * size, path):
            if len(data) % size:
                raise DataError(f"{path}: is truncated. Fetch it again.")
            # The first camera, as in VTAB.
            yield np.frombuffer(data, np.uint8).reshape(-1, *shape[1:])[:, 0]


def _smallnorb(root: Path, benchmark: str, records: str) -> Table:
    paths = []
    for part in ("dat", "info"):
        stem = f"{_NORB[records]}-{part}.mat"
        path = next((root / name for name in (stem, f"{stem}.gz") if (root / name).is_file()), None)
        if path is None:
            raise absent_error(root, benchmark, f"{stem}(.gz)")
        paths.append(path)
    with _norb_stream(paths[1]) as stream:
        shape, kind = _norb_header(stream, paths[1])
        data = _read(stream, -1, paths[1])
    if len(shape) != 2 or shape[1] != 4 or len(data) != kind.itemsize * shape[0] * 4:
        raise DataError(f"{paths[1]}: is not smallNORB's table, got {kind} {shape}. Fetch it again.")
    info = np.frombuffer(data, kind).reshape(shape)  # instance, elevation, azimuth, lighting
    labels = info[:, 1] if benchmark.endswith("elevation") else info[:, 2] // 2
    return Table(paths, labels.astype(np.int64), _norb_blocks)


def _norb_stream(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read(stream: IO[bytes], count: int, path: Path) -> bytes:
    try:
        return stream.read(count)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: is damaged ({error}). Fetch it again.") from None


def _norb_header(stream: IO[bytes], path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype from the header: a magic number, the number of dimensions, and at least three of them."""
    try:
        magic, dims = struct.unpack("<ii", stream.read(8))
        shape = struct.unpack(f"<{max(3, dims)}i", stream.read(4 * max(3, dims)))[:dims]
        return tuple(shape), _NORB_KINDS[magic]
    except (OSError, EOFError, struct.error, KeyError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: is not a file of smallNORB ({error!r}). Fetch it again.") from None


def _kitti(root: Path, split: str) -> FileSet:
    """Open KITTI's object detection images, split by video with the seed of TensorFlow Datasets."""
    top = next((p for p in (root, root / "kitti") if (p / "training").is_dir()), root)
    mapping = next(
        (p for p in (top / "mapping", top / "devkit/mapping", top / "devkit_object/mapping") if p.is_dir()), None
    )
    if mapping is None or not (top / "training/image_2").is_dir():
        raise absent_error(
            root, "vtab/kitti_closest_vehicle_distance", "training/{image_2,label_2} and mapping/ of devkit_object.zip"
        )
    try:
        order = [
            int(number)
            for number in read_text(mapping / "train_rand.txt", DataError).replace("\n", ",").split(",")
            if number.strip()
        ]
        videos = [line.split()[1] for line in lines(mapping / "train_mapping.txt")]
        of_image = [videos[number - 1] for number in order]
    except (ValueError, IndexError) as error:
        raise DataError(f"{mapping}: is not KITTI's mapping ({error}). Fetch devkit_object.zip again.") from None
    names, random = sorted(set(of_image)), np.random.RandomState(123)
    count = max(1, 10 * len(names) // 100)
    if len(names) < 3:
        raise DataError(f"{mapping}: has {len(names)} videos, too few to be split. Fetch devkit_object.zip again.")
    test = set(random.choice(names, count, replace=False).tolist())
    validation = set(random.choice([name for name in names if name not in test], count, replace=False).tolist())
    chosen = {"test": test, "validation": validation, "train": set(names) - test - validation}[split]
    images = [i for i, video in enumerate(of_image) if video in chosen]
    labels = [_closest_vehicle(top / f"training/label_2/{i:06d}.txt") for i in images]
    return FileSet(top, [f"training/image_2/{i:06d}.png" for i in images], labels, "label")


def _closest_vehicle(path: Path) -> int:
    kinds, depths = [], []
    try:
        for line in read_text(path, DataError).splitlines():
            words = line.split()
            if words and words[0] != "DontCare":
                kinds.append(_KITTI_TYPES.index(words[0]))
                depths.append(float(words[13]))
    except (ValueError, IndexError) as error:
        raise DataError(f"{path}: is not a label file of KITTI ({error}). Fetch it again.") from None
    return vehicle_class(kinds, depths)
