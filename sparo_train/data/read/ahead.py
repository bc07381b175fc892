"""Announcements of the samples that a worker will read, so that storages can fetch them in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan
from .sources import Source

_Chunk = tuple[int, int, int, int]  # source, shard, first sample, end


@dataclass
class _Window:
    """The window that a stream reads, and the chunks of the next one, of which `sent` were announced."""

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
        """Announce what is due before the sample at `position` of a stream is read."""
        start, length = self._plan.window_range(stream, position)
        window = self._windows.get(stream)
        if window is None or window.start != start:
            late = (
                self._remaining(stream, position, start + length)
                if window is None
                else window.next_chunks[window.sent :]
            )
            self._announce(late)
            window = _Window(start, list(self._plan.window_chunks(stream, start + length)))
            self._windows[stream] = window
        # In proportion to what was read, so that a server sends at an even rate.
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
