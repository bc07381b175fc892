"""Labelled images by number, from shards with `.cls` members or a folder with one folder per class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.signals import ignore_in_worker
from sparo_train.data.samples import decode_image, image_bytes
from sparo_train.data.shards import ShardReader
from sparo_train.data.sources import SourceConfig, open_source

Transform = Callable[[Image.Image, int], np.ndarray]  # an image and its number to (S, S, 3) uint8
IMAGE_KEYS = ("webp", "png", "jpg", "jpeg")


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """All images of a data set, in a fixed order.

    Args:
        place: a folder of shards, a glob, a brace range, a URL; or a folder of class folders with images.
        transform: what becomes of an image.
        key: what to call it in errors.

    Raises:
        DataError: nothing there; from reading: an image or a label that is missing or damaged (scores need all).
    """

    def __init__(self, place: str, transform: Transform, key: str):
        as_folder = Path(place).is_dir() and not any(Path(place).glob("*.tar"))
        config = SourceConfig(folder=place) if as_folder else SourceConfig(shards=place, image_keys=IMAGE_KEYS)
        self.source, self.transform, self.key = open_source(key, config, block="eval.tasks"), transform, key
        self._ends = np.cumsum([len(index) for index in self.source.indexes])
        broken = self.source.broken()
        if broken:
            raise DataError(
                f"{broken[0].url}: {broken[0].reason}; scores over part of a data set mean nothing, fetch it again"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        try:
            key, fields = self.source.read(_reader(), shard, number - before)
            image = decode_image(image_bytes(fields, IMAGE_KEYS))
        except BadSampleError as bad:
            raise DataError(f"{self.source.urls[shard]}: sample {number - before}: {bad}") from None
        if not fields.get("cls", b"").strip().isdigit():
            raise DataError(f"{self.source.urls[shard]}: sample {key} has no label (a .cls member, or a class folder)")
        return torch.from_numpy(np.array(self.transform(image, number))).permute(2, 0, 1), int(fields["cls"])


def read_batches(images: LabelledImages, numbers: list[list[int]], workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (pixels (b, 3, S, S) uint8, labels (b,)) of these numbers, in order; raises DataError as `images` does."""
    loader: DataLoader[Any] = DataLoader(
        _Told(images),
        batch_sampler=numbers,
        num_workers=workers,
        collate_fn=_collated,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        yield batch


class _Told(Dataset[Any]):
    """Images whose errors are delivered, not raised: torch would bury the message in a worker's traceback."""

    def __init__(self, images: LabelledImages):
        self.images = images

    def __getitem__(self, number: int) -> tuple[Tensor, int] | DataError:
        try:
            return self.images[number]
        except DataError as error:
            return error


def _collated(rows: list[Any]) -> Any:
    errors = [row for row in rows if isinstance(row, DataError)]
    return errors[0] if errors else default_collate(rows)


def batched(numbers: list[int], size: int) -> list[list[int]]:
    """Cut into batches, the last one perhaps smaller."""
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


_readers: list[ShardReader] = []  # one per process, opened when it first reads


def _reader() -> ShardReader:
    if not _readers:
        _readers.append(ShardReader())
    return _readers[0]


def _start_worker(_number: int) -> None:
    _readers.clear()  # handles of the parent
    torch.set_num_threads(1)
    ignore_in_worker()
