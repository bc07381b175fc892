"""Reused shared memory in which loader workers hand their parts of batches to the training process.

torch takes new shared memory for each batch: the kernel must clear its pages, and containers limit it (/dev/shm). This
memory is mapped before workers are forked; a page uses RAM only once it is written.
"""

from __future__ import annotations

import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

SLOT_BYTES = 1 << 28  # address space of one item; memory is only used as far as it is written
_ALIGNMENT = 64


class Place(NamedTuple):
    """Tensors in the ring: the worker, and for each tensor its name, byte offset in the worker's memory, dtype and shape."""

    worker: int
    tensors: list[tuple[str, int, torch.dtype, tuple[int, ...]]]


class Ring:
    """Slots of shared memory for the items of each worker.

    A worker fills its slots in turn. The parent must copy an item before it asks the same worker for another one, so that
    no slot is overwritten that is still in use.

    Args:
        workers: number of processes that will be forked.
        slots: number of items of a worker that may wait (`data.prefetch`), plus one that is being copied.
    """

    def __init__(self, workers: int, slots: int):
        self._slots = slots
        try:
            self._maps = [mmap.mmap(-1, slots * SLOT_BYTES) for _ in range(workers)]
        except OSError:  # address space is limited; use torch's shared memory
            self._maps = []

    def put(self, worker: int, number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor] | Place:
        """Copy the tensors of a worker's item; return where they are, or the tensors themselves if they do not fit.

        Args:
            worker: number of this worker.
            number: count of this worker's earlier items.
            tensors: contiguous tensors by name.
        """
        sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors.values()]
        if not self._maps or sum(sizes) > SLOT_BYTES:
            return tensors
        place, at = Place(worker, []), number % self._slots * SLOT_BYTES
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            place.tensors.append((name, at, tensor.dtype, tuple(tensor.shape)))
            self._view(worker, at, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
            at += size
        return place

    def get(self, item: dict[str, Tensor] | Place) -> dict[str, Tensor]:
        """Return the tensors that `put` was given. The worker overwrites these views after its next item was asked for."""
        if not isinstance(item, Place):
            return item
        return {name: self._view(item.worker, at, dtype, shape) for name, at, dtype, shape in item.tensors}

    def _view(self, worker: int, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._maps[worker], dtype=dtype, count=count, offset=at).view(shape)
