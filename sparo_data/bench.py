"""`sparo data bench`: samples per second of one worker, and the time of each stage."""

from __future__ import annotations

import time
from contextlib import closing
from typing import NamedTuple

import torch

from sparo_train.core.errors import BadSampleError
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.sources.shards import close_reader


class Timing(NamedTuple):
    """Samples read, seconds by stage in one process, and samples/s of the whole pipeline with its workers."""

    samples: int
    seconds: dict[str, float]
    workers: int
    pipeline_rate: float

    @property
    def worker_rate(self) -> float:
        return self.samples / sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        total = sum(self.seconds.values())
        return {stage: s / total for stage, s in self.seconds.items()}


def bench(pipeline: Pipeline, samples: int = 512) -> Timing:
    """Time the stages in this process on one thread, then the pipeline with its workers, each over `samples` in plan order."""
    threads = torch.get_num_threads()
    # One thread, as in a loader's worker; several would overestimate a worker's speed.
    torch.set_num_threads(1)
    seconds: dict[str, float] = {}
    used = sum(_time_one(pipeline, number, seconds) for number in range(samples))
    # Close the reader, because workers open their own, and a forked one would share its file positions.
    close_reader()
    torch.set_num_threads(threads)
    with closing(pipeline.start()) as batches:
        # Do not time the first batch, for which workers start and fill their prefetch queues.
        next(batches)
        begin, count = time.perf_counter(), 0
        while count < samples:
            count += len(next(iter(next(batches).batch.values())))
        spent = time.perf_counter() - begin
    return Timing(used, seconds, pipeline.workers, count / spent)


def _time_one(pipeline: Pipeline, number: int, seconds: dict[str, float]) -> bool:
    # Alternate between streams, as batches do, so that shards are opened as often.
    plan, before = pipeline.plan, time.perf_counter()
    spent: dict[str, float] = {}

    def on_stage(stage: str) -> None:
        nonlocal before
        now = time.perf_counter()
        spent[stage], before = now - before, now

    try:
        pipeline.example(plan.sample_at(number % plan.streams, number // plan.streams), on_stage)
    except BadSampleError:
        return False
    for stage, value in spent.items():
        seconds[stage] = seconds.get(stage, 0.0) + value
    return True
