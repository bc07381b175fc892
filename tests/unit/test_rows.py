"""Rows of batches for any world size, workers, kills and growing batches: each sample is read once per pass, in one order."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparo_train.core.contracts import Cursor
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.read import loader
from sparo_train.data.read.loader import Examples, Pipeline, _Workers
from sparo_train.data.sources.base import DataConfig, Source, SourceConfig, Storage

RING = SimpleNamespace(put=lambda worker, item, batch: batch)  # a ring that copies nothing


class Numbers(Storage):
    """Samples that consist of their shard and number; some are invalid."""

    def __init__(self, shard, length, bad):
        self.url, self._shard, self._length, self._bad = f"{shard}.tar", shard, length, bad

    def __len__(self):
        return self._length

    def read(self, number):
        if (self._shard, number) in self._bad:
            raise BadSampleError("bad image")
        return f"{number}", {"number": f"{self._shard} {number}".encode()}


class NumberExamples(Examples):
    """Return the shard and the number of each sample."""

    def prepare(self, fields, source, rng, on_stage=None):
        return [int(word) for word in fields["number"].split()]

    def stack(self, examples):
        return {"number": torch.tensor(examples)}


def pipeline(lengths, bad, streams, per_stream, rank=0, world_size=1, window=7, chunk=3):
    config = DataConfig.model_construct(
        sources={"a": SourceConfig(kind="numbers")}, workers=0, streams=streams, chunk=chunk, shuffle_window=window
    )
    source = Source("a", SourceConfig(kind="numbers"), [Numbers(i, n, bad) for i, n in enumerate(lengths)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "open_source", lambda name, config: source)
        return Pipeline(config, streams * per_stream, NumberExamples(), 3, rank, world_size)


def read(make, per_stream, world_size, workers, cursor, steps):
    """Return the rows of global batches, the number of skipped samples, and the cursor, as ranks with workers read them."""
    batches, skipped, parts = [[] for _ in range(steps)], 0, []
    for rank in range(world_size):
        p = make(per_stream, rank, world_size)
        count = min(workers, len(p.rows))
        positions = p._next_positions(cursor)
        iterators = []
        for number in range(count):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loader, "get_worker_info", lambda n=number, c=count: SimpleNamespace(id=n, num_workers=c))
                iterators.append(iter(_Workers(p, positions, RING)))
                first = next(iterators[-1])  # the number is requested at the first batch
                iterators[-1] = (first, iterators[-1])
        at = positions[p.rows.start : p.rows.stop]
        for step in range(steps):
            items = [first if step == 0 else next(more) for first, more in iterators]
            skipped += sum(sum(item.skipped.values()) for item in items)
            batches[step] += [tuple(row) for item in items for row in item.batch["number"].tolist()]
            at = [position for item in items for position in item.positions]
        parts.append(Cursor(tuple(at), per_stream))
    return batches, skipped, Cursor(tuple(json.loads(json.dumps(Cursor.join(parts).to_json()))))


lengths_and_bad = st.lists(st.integers(8, 30), min_size=1, max_size=3).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths),
        st.sets(st.tuples(st.integers(0, len(lengths) - 1), st.integers(0, 29)), max_size=4),
    )
)


@given(
    lengths_and_bad,
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3)), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_every_world_reads_the_same_batches_through_kills(data, streams, per_stream, starts):
    lengths, bad = data

    def make(n, rank=0, world_size=1):
        return pipeline(lengths, bad, streams, n, rank, world_size)

    cursor, got, skipped = None, [], 0
    for world_size, workers, steps, lost in starts:
        size = next(w for w in range(world_size, 0, -1) if streams * per_stream % w == 0)
        batches, some, cursor_after = read(make, per_stream, size, workers, cursor, steps)
        # The batches after the last checkpoint are lost, and the next start reads them again.
        kept = max(0, steps - lost)
        if kept < steps:
            batches, some, cursor_after = (
                read(make, per_stream, size, workers, cursor, kept) if kept else ([], 0, cursor)
            )
        got, skipped, cursor = got + batches, skipped + some, cursor_after
    straight, passed_over, end = read(make, per_stream, 1, 1, None, len(got)) if got else ([], 0, None)
    assert got == straight and skipped == passed_over and cursor == end


@given(
    lengths_and_bad,
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_a_run_whose_batch_grows_repeats_and_loses_no_sample(data, streams, stages):
    lengths, bad = data
    bad &= {(shard, number) for shard, length in enumerate(lengths) for number in range(length)}
    cursor, seen, per_stream = None, Counter(), 1
    for growth, world_size, steps in stages:
        per_stream *= growth

        def make(n, rank=0, world=1):
            return pipeline(lengths, bad, streams, n, rank, world)

        size = next(w for w in range(world_size, 0, -1) if streams * per_stream % w == 0)
        if steps:
            batches, _, cursor = read(make, per_stream, size, 2, cursor, steps)
            seen.update(row for batch in batches for row in batch)
    if cursor is None:
        return
    # Exactly the positions before the rows' next ones were read, each once.
    plan, rows = make(per_stream).plan, make(per_stream)._next_positions(cursor)
    expected = Counter()
    for row, after in enumerate(rows):
        for position in range(after % per_stream, after, per_stream):
            ref = plan.sample_at(row // per_stream, position)
            if (ref.shard, ref.ordinal) not in bad:
                expected[ref.shard, ref.ordinal] += 1
    assert seen == expected


def test_a_batch_that_does_not_fit_the_rows_of_a_checkpoint_is_refused():
    make = lambda n, rank=0, world=1: pipeline([30], {(0, 3)}, 2, n, rank, world)  # noqa: E731
    _, skipped, cursor = read(make, 4, 1, 1, None, 3)
    assert skipped == 1 and len(cursor.positions) == 8  # the rows differ since one of them skipped a sample
    with pytest.raises(DataError, match=r"batch_size=12: .*8 rows.*Use a multiple of 8"):
        make(6)._next_positions(cursor)
    _, _, even = read(lambda *a: pipeline([30], set(), 2, *a), 4, 1, 1, None, 3)
    assert even.positions == (12, 12) and make(6)._next_positions(even) == [*range(12, 18)] * 2


def test_workers_read_whole_streams_where_they_can():
    p = pipeline([500], set(), 6, 4)
    assert [p.rows_of_worker(i, 4) for i in range(4)] == [range(4), range(4, 12), range(12, 16), range(16, 24)]
    assert [len(p.rows_of_worker(i, 12)) for i in range(12)] == [2] * 12
    half = pipeline([500], set(), 3, 4, rank=1, world_size=2)  # half of one stream, and another whole stream
    assert [half.rows_of_worker(i, 2) for i in range(2)] == [range(6, 8), range(8, 12)]
