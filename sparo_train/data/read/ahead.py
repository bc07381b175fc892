"""Announces to storages which samples a worker will read next, so that they can fetch them in time (streams: `plan.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan
from .sources import Source

_Chunk = tuple[int, int, int, int]  # source, shard, and samples [first, end)


@dataclass
class _Window:
    """Start of a stream's present window, the chunks of its next window, and how many of those are announced."""

    start: int
    next_chunks: list[_Chunk]
    sent: int = 0


class ReadAhead:
    """Announces each stream's next window, chunk by chunk, while the present one is read.

    A window's samples are read in random order, so all of them should have arrived before the first one is read.
    """

    def __init__(self, plan: Plan, sources: Sequence[Source]):
        self._plan, self._sources = plan, sources
        self._windows: dict[int, _Window] = {}

    def advance(self, stream: int, position: int) -> None:
        """Announce samples to storages. Call it before each sample of a stream is read, in the order of positions."""
        start, length = self._plan.window_range(stream, position)
        window = self._windows.get(stream)
        if window is None or window.start != start:
            # The order is random: announce everything of this window that was not announced yet.
            if window is not None:
                self._announce(window.next_chunks[window.sent :])
            elif position == start:
                self._announce(list(self._plan.window_chunks(stream, start)))
            else:
                self._announce(self._remaining(stream, position, start + length))
            window = _Window(start, list(self._plan.window_chunks(stream, start + length)))
            self._windows[stream] = window
        # Chunks are announced at the rate of reading, for an even rate of requests.
        due = -(-(position - start + 1) * len(window.next_chunks) // length)
        self._announce(window.next_chunks[window.sent : due])
        window.sent = max(window.sent, due)

    def _remaining(self, stream: int, position: int, end: int) -> list[_Chunk]:
        """Return runs of neighbouring samples that are still to be read after resuming inside a window."""
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
