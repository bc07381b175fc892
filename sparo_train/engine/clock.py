"""How long a device was busy with something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up time: with events on a GPU, which runs behind the program, and by the wall on a CPU."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is done inside."""
        if self.on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            # Recorded, not read: reading would make the program wait for the device.
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def take(self) -> float:
        """Seconds since the last call; waits for what is still running."""
        if self._events:
            # The last one ends after all before it: one wait is enough.
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
            self._events = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds
