"""The plan reads every sample as often as it should, in an order that depends on the seed and the position only."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparo_train.core.errors import ConfigError
from sparo_train.data.read.ahead import ReadAhead
from sparo_train.data.read.plan import Plan

shard_counts = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda c: sum(c) > 0)
plans = st.builds(
    lambda counts, weights, seed, chunk, window, grouped: (
        *(counts, (weights * len(counts))[: len(counts)], seed, chunk, window),
        [[(grouped >> i) % 2 == 1 for i in range(len(shards))] for shards in counts],
    ),
    st.lists(shard_counts, min_size=1, max_size=3),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=3),
    st.integers(0, 2**40),
    st.integers(1, 70),
    st.integers(1, 50),
    st.integers(0, 63),
)


def build(spec, streams=1):
    counts, weights, seed, chunk, window, whole = spec
    return Plan(counts, weights, seed, streams, chunk, window, whole)


def epoch_of(plan, epoch):
    return [
        plan.sample_at(stream, epoch * plan.stream_length(stream) + i)
        for stream in range(plan.streams)
        for i in range(plan.stream_length(stream))
    ]


@given(plans, st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_visits_every_sample_weight_times(spec, streams, epoch):
    counts, weights, *_ = spec
    if sum(w * sum(c) for w, c in zip(weights, counts, strict=True)) < streams:
        return
    seen = Counter((r.source, r.shard, r.ordinal) for r in epoch_of(build(spec, streams), epoch))
    expected = {
        (source, shard, ordinal): int(weights[source])
        for source, shards in enumerate(counts)
        for shard, n in enumerate(shards)
        for ordinal in range(n)
    }
    assert seen == expected


@given(plans, st.integers(1, 4), st.integers(0, 200))
@settings(max_examples=40, deadline=None)
def test_any_position_is_computed_independently_of_earlier_ones(spec, streams, position):
    counts, weights, *_ = spec
    if sum(w * sum(c) for w, c in zip(weights, counts, strict=True)) < streams:
        return
    walked, fresh = build(spec, streams), build(spec, streams)
    for i in range(position):
        walked.sample_at(0, i)
    assert walked.sample_at(0, position) == fresh.sample_at(0, position)


@given(st.integers(1, 90), st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.7]), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_fractional_weights_finish_a_pass_before_the_next(total, weight, seed):
    plan = Plan([[total]], [weight], seed, 1, chunk=7, window=5)
    seen: Counter[int] = Counter()
    for epoch in range(6):
        seen.update(r.ordinal for r in epoch_of(plan, epoch))
        counts = [seen[i] for i in range(total)]
        assert max(counts) - min(counts) <= 1


def test_window_chunks_cover_exactly_what_the_window_reads():
    plan = Plan([[30, 50], [25]], [1.0, 2.0], 3, 4, chunk=8, window=16)
    for stream in range(4):
        length = plan.stream_length(stream)
        for position in range(0, length, 16):
            read = sorted(plan.sample_at(stream, p)[1:] for p in range(position, min(position + 16, length)))
            ahead = sorted((s, d, i) for s, d, a, b in plan.window_chunks(stream, position) for i in range(a, b))
            assert read == ahead


def test_a_row_group_is_divided_by_windows_and_streams_only():
    whole = Plan([[20] * 30 + [100]], [1.0], 0, 2, chunk=4, window=64, whole=[[True] * 31])
    windows = [
        Counter(shard for _, shard, _, _ in whole.window_chunks(stream, position))
        for stream in range(2)
        for position in range(0, whole.stream_length(stream), 64)
    ]
    reads = sum((Counter(window.keys()) for window in windows), Counter())
    cuts = len(windows) - 1
    assert sum(reads[shard] for shard in range(30)) <= 30 + cuts
    assert reads[30] <= 4  # two chunks of at most a window, each of which may be cut
    parts = Plan([[20] * 30], [1.0], 0, 2, chunk=4, window=64)
    assert sum(1 for s in range(2) for p in range(0, 300, 64) for _ in parts.window_chunks(s, p)) > 150


class Announced:
    """A storage that counts samples that were announced and not read yet."""

    def __init__(self):
        self.waiting = Counter[int]()

    def read_ahead(self, first, last):
        self.waiting.update(range(first, last))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 50),
    st.integers(0, 200),
    st.integers(1, 5),
    st.integers(1, 3),
)
@settings(max_examples=120, deadline=None)
def test_every_sample_is_announced_once_and_before_it_is_read(counts, streams, chunk, window, start, rows, processes):
    plan = Plan([counts], [1.0], 0, min(streams, sum(counts)), chunk=chunk, window=window)
    for process in range(min(processes, rows)):
        storages = [Announced() for _ in counts]
        own = range(process * rows // processes, (process + 1) * rows // processes)
        at = {row: start + row for row in own}
        ahead = ReadAhead(plan, [SimpleNamespace(storages=storages)], at, rows)
        for row in list(own) * (120 // rows):
            ahead.advance(0, at[row])
            ref = plan.sample_at(0, at[row])
            at[row] += rows
            storages[ref.shard].waiting[ref.ordinal] -= 1
            assert min(min(s.waiting.values(), default=0) for s in storages) >= 0
            assert sum(s.waiting.total() for s in storages) <= 2 * min(window, plan.stream_length(0))


def test_orders_differ_between_seeds_and_epochs():
    orders = [tuple(epoch_of(Plan([[64]], [1.0], seed, 2), epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(r.ordinal for r in order) for order in orders}) == 4


def test_neighbours_on_disk_are_spread_over_the_epoch():
    plan = Plan([[1000] * 4], [1.0], 0, 8, chunk=32, window=256)
    order = [r.shard * 1000 + r.ordinal for r in epoch_of(plan, 0)]
    assert abs(np.corrcoef(order, range(4000))[0, 1]) < 0.2


def test_a_thousand_ranks_share_an_epoch_evenly():
    plan = Plan([[10_000] * 40], [1.0], 0, 1024)
    lengths = [plan.stream_length(s) for s in range(1024)]
    assert sum(lengths) == 400_000 and max(lengths) - min(lengths) <= 1


def test_more_streams_than_samples_are_refused():
    with pytest.raises(ConfigError, match=r"data\.streams=8: an epoch has only 5 samples"):
        Plan([[5]], [1.0], 0, 8)
