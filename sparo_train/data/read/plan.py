"""The data plan: the next sample is a pure function of (seed, stream, position).

An epoch visits `round(weight * n)` samples of every source (at least one if the weight is above zero) and always
finishes a pass over a source before it begins the next. A pass is cut into chunks of neighbouring samples at a random
offset; a row group of Parquet or an Arrow file of LitData is one chunk. The chunks of all sources are permuted and
concatenated, the result is cut into C streams of equal length, and each stream is shuffled inside windows:

    pass       (seed, source, pass)            order and offset of a source's chunks
    epoch      (seed, epoch)                   order of all chunks
    window     (seed, epoch, stream, window)   order inside a window of a stream

A global batch has batch/C rows of each stream, and the rows take the stream's samples in turn: row i of n reads the
positions i, i+n, i+2n, … If a sample cannot be used, its row alone skips it. Rows are distributed over ranks and workers.
Any number of ranks and workers therefore reads the same global batches, and a cursor is the next position of each row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...core.errors import ConfigError
from ...core.rng import generator


class SampleRef(NamedTuple):
    """One visit of a sample: its source, shard, ordinal in the shard, and the pass over the source, which visits each sample once."""

    pass_index: int
    source: int
    shard: int
    ordinal: int


@dataclass(frozen=True)
class _Epoch:
    """Chunks of an epoch in order: pass, source, shard, start, and the cumulative end of each."""

    pass_index: np.ndarray
    source: np.ndarray
    shard: np.ndarray
    start: np.ndarray
    ends: np.ndarray

    def sample_at(self, index: int) -> SampleRef:
        i = int(np.searchsorted(self.ends, index, side="right"))
        before = int(self.ends[i - 1]) if i else 0
        return SampleRef(
            int(self.pass_index[i]), int(self.source[i]), int(self.shard[i]), int(self.start[i]) + index - before
        )


def epoch_sizes(totals: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the number of samples that an epoch takes from each source."""
    # At least one for a weight above zero, so that rounding cannot drop a tiny source.
    return [max(1, round(w * n)) if n and w else 0 for w, n in zip(weights, totals, strict=True)]


def source_shares(totals: Sequence[int], weights: Sequence[float], read: int) -> list[tuple[float, float]]:
    """Return each source's share of `read` samples, and how many passes over the source they are."""
    counts = epoch_sizes(totals, weights)
    return [(n / sum(counts), read * n / sum(counts) / total) for n, total in zip(counts, totals, strict=True)]


def repetition_warning(totals: Sequence[int], weights: Sequence[float], batch_size: int) -> str:
    """Return a warning if every batch contains samples more than once, otherwise an empty string.

    Args:
        totals, weights: samples and weight of each source.
        batch_size: samples of a global batch.
    """
    samples = sum(total for total, weight in zip(totals, weights, strict=True) if weight)
    if batch_size <= samples:
        return ""
    return (
        f"batch_size={batch_size}: every batch contains samples more than once, because the data has only {samples:,}. "
        "Contrastive losses treat these copies as different samples. Lower batch_size."
    )


class Plan:
    """Order of all samples, without end.

    Args:
        counts: samples per shard, per source.
        weights: passes over each source per epoch (2.0: every sample twice, 0.5: every other epoch).
        seed: the run's seed.
        streams: C, number of streams that the epoch is cut into.
        chunk: neighbouring samples that stay together.
        window: samples of a stream that are shuffled together.
        whole: for each shard of each source, whether it is one chunk instead of several; if it has more than `window` samples,
            its chunks have `window` samples. Default: no shard.

    Raises:
        ConfigError: no samples, or fewer samples per epoch than streams.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        weights: Sequence[float],
        seed: int,
        streams: int,
        chunk: int = 64,
        window: int = 2048,
        whole: Sequence[Sequence[bool]] | None = None,
    ):
        self.counts = [np.asarray(c, dtype=np.int64) for c in counts]
        self.seed, self.streams, self.chunk, self.window = seed, streams, chunk, window
        self.totals = [int(c.sum()) for c in self.counts]
        self._whole = [np.asarray(w, dtype=bool) for w in whole or [[False] * len(c) for c in counts]]
        self.epoch_sizes = epoch_sizes(self.totals, weights)
        self.epoch_size = sum(self.epoch_sizes)
        if self.epoch_size < streams:
            raise ConfigError(
                f"data.streams={streams}: an epoch has only {self.epoch_size} samples. Use at most that many streams."
            )
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()

    def stream_length(self, stream: int) -> int:
        """Return the samples of a stream per epoch; streams differ by at most one."""
        # Compute borders by multiplication instead of adding lengths: streams differ by one at most, and together they
        # are the epoch.
        return (stream + 1) * self.epoch_size // self.streams - stream * self.epoch_size // self.streams

    def sample_at(self, stream: int, position: int) -> SampleRef:
        """Return the sample at `position` (0, 1, … without end) of `stream`."""
        length = self.stream_length(stream)
        epoch, offset = divmod(position, length)
        window, inside = divmod(offset, self.window)
        # The last window is shorter; its order is a permutation of its samples.
        order = self._window_order(epoch, stream, window, min(self.window, length - window * self.window))
        begin = stream * self.epoch_size // self.streams + window * self.window
        return self._epoch(epoch).sample_at(begin + int(order[inside]))

    def window_range(self, stream: int, position: int) -> tuple[int, int]:
        """Return the first position of the window that contains `position`, and the window's length."""
        length = self.stream_length(stream)
        offset = position % length
        first = offset - offset % self.window
        return position - offset + first, min(self.window, length - first)

    def window_chunks(self, stream: int, position: int) -> Iterator[tuple[int, int, int, int]]:
        """Return (source, shard, first, last+1) of the ranges that the window at `position` reads, for read-ahead."""
        start, size = self.window_range(stream, position)
        epoch, offset = divmod(start, self.stream_length(stream))
        begin = stream * self.epoch_size // self.streams + offset
        end, chunks = begin + size, self._epoch(epoch)
        while begin < end:
            _, source, shard, first = chunks.sample_at(begin)
            i = int(np.searchsorted(chunks.ends, begin, side="right"))
            take = min(end, int(chunks.ends[i])) - begin
            yield source, shard, first, first + take
            begin += take

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            parts = [self._epoch_chunks(source, epoch) for source, size in enumerate(self.epoch_sizes) if size]
            table = np.concatenate(parts)
            # Permute the chunks of all sources together, so that a batch has its sources in proportion.
            table = table[generator(self.seed, "epoch", epoch).permutation(len(table))]
            self._epochs[epoch] = _Epoch(table[:, 0], table[:, 1], table[:, 2], table[:, 3], np.cumsum(table[:, 4]))
            while len(self._epochs) > 2:  # streams reach the end of an epoch within a few samples of each other
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]

    def _epoch_chunks(self, source: int, epoch: int) -> np.ndarray:
        """Return rows (pass, source, shard, start, length) that `epoch` takes from the endless sequence of passes over a source."""
        size, total = self.epoch_sizes[source], self.totals[source]
        begin, end = epoch * size, (epoch + 1) * size
        # An epoch may end one pass and begin the next, or contain several.
        rows = []
        for number in range(begin // total, (end - 1) // total + 1):
            shard, start, length = self._pass(source, number)
            ends = np.cumsum(length)
            lo, hi = max(0, begin - number * total), min(total, end - number * total)
            cut_lo, cut_hi = np.clip(lo - (ends - length), 0, length), np.clip(ends - hi, 0, length)
            left = length - cut_lo - cut_hi
            here = left > 0
            which = np.full((2, here.sum()), [[number], [source]])
            rows.append(np.stack([*which, shard[here], (start + cut_lo)[here], left[here]], axis=1))
        return np.concatenate(rows)

    def _pass(self, source: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a pass over a source: chunks (shard, start, length) in random order, cut at a random offset per shard."""
        rng, counts = generator(self.seed, "pass", source, number), self.counts[source]
        # Another offset in every pass, so that chunks do not always join the same neighbours.
        whole = self._whole[source]
        offsets = np.where(whole, 0, rng.integers(0, self.chunk, size=len(counts)))
        chunks = np.where(whole, np.clip(counts, 1, self.window), self.chunk)
        shard = np.repeat(np.arange(len(counts)), (counts + offsets + chunks - 1) // chunks)
        first = np.r_[0, np.flatnonzero(np.diff(shard)) + 1] if len(shard) else np.zeros(0, dtype=np.int64)
        nth = np.arange(len(shard)) - np.repeat(first, np.diff(np.r_[first, len(shard)]))
        start = np.maximum(nth * chunks[shard] - offsets[shard], 0)
        stop = np.minimum((nth + 1) * chunks[shard] - offsets[shard], counts[shard])
        # The random offset may leave a shard's first or last chunk empty.
        keep = np.flatnonzero(stop > start)
        keep = keep[rng.permutation(len(keep))]
        return shard[keep], start[keep], (stop - start)[keep]

    def _window_order(self, epoch: int, stream: int, window: int, size: int) -> np.ndarray:
        key = (epoch, stream, window)
        if key not in self._windows:
            # Seed by the window's name instead of previous draws, because a resumed run needs this window first.
            self._windows[key] = generator(self.seed, "window", epoch, stream, window).permutation(size)
            while len(self._windows) > 2 * self.streams:
                self._windows.popitem(last=False)
        return self._windows[key]
