"""How often an epoch decodes each row group of Parquet, counted without data.

    python benchmarks/row_groups.py [--quick]

The real plan and read-ahead of two loader workers, each of which keeps two decoded groups. 200,000 samples, a shuffle
window of 2,048, four rows of a batch per stream, the mean over two epochs.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import SimpleNamespace

from sparo_train.data.read.ahead import ReadAhead
from sparo_train.data.read.plan import Plan

SAMPLES, WINDOW, PER_STREAM, WORKERS, EPOCHS, KEPT = 200_000, 2048, 4, 2, 2, 2


class CountedGroup:
    """A row group that counts how often it is decoded."""

    def __init__(self, decoded: OrderedDict[CountedGroup, None]):
        self.decoded, self.reads = decoded, 0

    def read_ahead(self, first: int, last: int) -> None:
        if self not in self.decoded:
            self.reads += 1
            self.decoded[self] = None
        self.decoded.move_to_end(self)
        while len(self.decoded) > KEPT:
            self.decoded.popitem(last=False)


def decodings(samples: int, rows: int, streams: int, whole: bool) -> float:
    """Return the mean number of times that an epoch decodes a group of `rows` samples."""
    groups = samples // rows
    plan = Plan([[rows] * groups], [1.0], 0, streams, window=WINDOW, whole=[[whole] * groups])
    total = 0
    for worker in range(WORKERS):
        decoded = OrderedDict[CountedGroup, None]()
        storages = [CountedGroup(decoded) for _ in range(groups)]
        own = streams * PER_STREAM // WORKERS
        at = {row: row % PER_STREAM for row in range(worker * own, (worker + 1) * own)}
        ahead = ReadAhead(plan, [SimpleNamespace(storages=storages)], at, PER_STREAM)  # type: ignore[list-item]
        for _ in range(EPOCHS * plan.epoch_size // (streams * PER_STREAM)):
            for row in at:
                ahead.advance(row // PER_STREAM, at[row])
                at[row] += PER_STREAM
        total += sum(group.reads for group in storages)
    return total / EPOCHS / groups


if __name__ == "__main__":
    samples = 20_000 if "--quick" in sys.argv[1:] else SAMPLES
    print("| rows per group | streams | chunks of 64 | whole groups |\n|---|---|---|---|")
    for rows in (100, 256, 1000, 2048, 10_000):
        for streams in (16, 64):
            parts, whole = (decodings(samples, rows, streams, choice) for choice in (False, True))
            print(f"| {rows:,} | {streams} | {parts:.1f} | {whole:.1f} |")
