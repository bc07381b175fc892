"""Announces to storages which samples a worker will read next, so that they can fetch them in time (streams: `plan.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..sources.base import Source
from .plan import Plan

_Chunk = tuple[int, int, int, int]  # source, shard, and samples [first, end)


@dataclass
class _Window:
    """Start and length of a stream's present window, the chunks of its next window, and how many of those are announced."""

    start: int
    length: int
    next_chunks: list[_Chunk]
    sent: int = 0


class ReadAhead:
    """Announces each stream's next window, chunk by chunk, while the present one is read.

    A window's samples are read in random order, so all of them should have arrived before the first one is read.

    Args:
        plan: the data plan.
        sources: its sources.
        next_positions: the next position of each row that this process reads. It is updated by the caller.
        per_stream: rows of a stream in a global batch; row r belongs to stream r // per_stream.
    """

    def __init__(self, plan: Plan, sources: Sequence[Source], next_positions: Mapping[int, int], per_stream: int):
        self._plan, self._sources, self._next, self._per_stream = plan, sources, next_positions, per_stream
        self._windows: dict[int, _Window] = {}
        self._rows: dict[int, list[int]] = {}
        for row in next_positions:
            self._rows.setdefault(row // per_stream, []).append(row)

    def advance(self, stream: int, position: int) -> None:
        """Announce samples to storages. Call it before each sample is read."""
        start, length = self._plan.window_range(stream, position)
        window = self._windows.get(stream)
        if window is None or start > window.start:
            # The order is random: announce everything of this window that was not announced yet.
            if window is not None and start == window.start + window.length:
                self._announce(window.next_chunks[window.sent :])
            else:
                self._announce(self._chunks(stream, start))
            window = _Window(start, length, self._chunks(stream, start + length))
            self._windows[stream] = window
        # Another row of the stream may have reached the next window before this one, after it skipped a sample.
        if start == window.start:
            # Chunks are announced at the rate of reading, for an even rate of requests.
            due = -(-(position - start + 1) * len(window.next_chunks) // length)
            self._announce(window.next_chunks[window.sent : due])
            window.sent = max(window.sent, due)

    def _chunks(self, stream: int, start: int) -> list[_Chunk]:
        """Return runs of neighbouring samples of a window that this process has still to read."""
        start, length = self._plan.window_range(stream, start)
        n, upcoming = self._per_stream, (self._next[row] for row in self._rows[stream])
        positions = [p for at in upcoming for p in range(max(at, start + (at - start) % n), start + length, n)]
        if len(positions) == length:
            return list(self._plan.window_chunks(stream, start))
        runs: list[_Chunk] = []
        for _, source, shard, number in sorted(self._plan.sample_at(stream, at) for at in positions):
            if runs and runs[-1][:2] == (source, shard) and runs[-1][3] == number:
                runs[-1] = (*runs[-1][:3], number + 1)
            else:
                runs.append((source, shard, number, number + 1))
        return runs

    def _announce(self, chunks: Sequence[_Chunk]) -> None:
        for source, shard, first, end in chunks:
            self._sources[source].storages[shard].read_ahead(first, end)
