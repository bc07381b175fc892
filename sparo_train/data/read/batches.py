"""Batches for training, joined from the parts that loader workers prepare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...core.accelerator import is_streaming
from ...core.contracts import LoaderBatch
from .workers import WorkerItems


class Batches(Iterator[LoaderBatch]):
    """Batches of this rank. `close` ends the workers.

    For a GPU, a thread joins the next batch in pinned memory while a step is computed. Otherwise the training thread
    would copy each batch twice: to join its parts, and to pin it. torch reuses pinned memory.

    Args:
        parts: parts of batches, in order.
        per_batch: number of parts of a batch.
        join: makes a batch of its parts; the second argument concatenates the parts of a tensor.
        device: the device of training.
    """

    def __init__(
        self,
        parts: WorkerItems,
        per_batch: int,
        join: Callable[[list[Any], Callable[[list[Tensor]], Tensor]], LoaderBatch],
        device: torch.device,
    ):
        self._parts, self._per_batch, self._join, self._device = parts, per_batch, join, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches") if is_streaming(device) else None
        self._next_batch: Future[LoaderBatch] | None = None

    def __next__(self) -> LoaderBatch:
        if self._thread is None:
            return self._join(self._take(), torch.cat)
        batch = (self._next_batch or self._thread.submit(self._pinned)).result()
        self._next_batch = self._thread.submit(self._pinned)
        return batch

    def _take(self) -> list[Any]:
        return [next(self._parts) for _ in range(self._per_batch)]

    def _pinned(self) -> LoaderBatch:
        parts = self._take()
        # Threads start with device 0, where pinning would create a second context. Not before the workers have started.
        torch.accelerator.set_device_index(self._device.index or 0)
        batch = self._join(parts, _cat_pinned)
        # The method may have replaced or cut tensors. A copy from a view that is not contiguous is not asynchronous.
        return batch._replace(batch={name: tensor.contiguous().pin_memory() for name, tensor in batch.batch.items()})

    def close(self) -> None:
        self._parts.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def _cat_pinned(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    shape = (sum(map(len, tensors)), *first.shape[1:])
    return torch.cat(tensors, out=torch.empty(shape, dtype=first.dtype, pin_memory=True))
