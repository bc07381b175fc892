"""Announcements of the samples that a worker will read, so that storages can fetch them in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan
from .sources import Source

_Chunk = tuple[int, int, int, int]  # source, shard, first sample, end


@dataclass
class _Window:
    """First position of the window that a stream reads, chunks of the next window, and how many of these were announced."""

    start: int
    next_chunks: list[_Chunk]
    sent: int = 0


class ReadAhead:
    """Announces each stream's next window, chunk by chunk, while the present one is read.

    Inside a window, samples are in random order, so all of it must be there when its first sample is read.
    """

    def __init__(self, plan: Plan, sources: Sequence[Source]):
        self._plan, self._sources = plan, sources
        self._windows: dict[int, _Window] = {}

    def advance(self, stream: int, position: int) -> None:
        """Announce samples to storages. Call it before the sample at `position` of a stream is read."""
        start, length = self._plan.window_range(stream, position)
        window = self._windows.get(stream)
        if window is None or window.start != start:
            # All of this window that was not announced, because its samples are read in random order.
            if window is not None:
                self._announce(window.next_chunks[window.sent :])
            elif position == start:
                self._announce(list(self._plan.window_chunks(stream, start)))
            else:
                self._announce(self._remaining(stream, position, start + length))
            window = _Window(start, list(self._plan.window_chunks(stream, start + length)))
            self._windows[stream] = window
        # In proportion to the samples read so far, for an even rate of requests.
        due = -(-(position - start + 1) * len(window.next_chunks) // length)
        self._announce(window.next_chunks[window.sent : due])
        window.sent = max(window.sent, due)

    def _remaining(self, stream: int, position: int, end: int) -> list[_Chunk]:
        """Return runs of neighbouring samples that a start in the middle of a window still reads."""
        runs: list[_Chunk] = []
        for _, source, shard, number in sorted(self._plan.at(stream, at) for at in range(position, end)):
            if runs and runs[-1][:2] == (source, shard) and runs[-1][3] == number:
                runs[-1] = (*runs[-1][:3], number + 1)
            else:
                runs.append((source, shard, number, number + 1))
        return runs

    def _announce(self, chunks: Sequence[_Chunk]) -> None:
        for source, shard, first, end in chunks:
            self._sources[source].storages[shard].read_ahead(first, end)
