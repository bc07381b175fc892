"""`sparo data bench`: samples per second of one worker, and where its time goes."""

from __future__ import annotations

import time
from contextlib import closing
from typing import NamedTuple

import torch

from ..core.errors import BadSampleError
from .loader import Pipeline
from .shards import ShardReader


class Timing(NamedTuple):
    """Samples read, seconds by stage of one process, and samples/s of the whole pipeline with its workers."""

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
    torch.set_num_threads(1)
    seconds: dict[str, float] = {}
    reader = ShardReader()
    used = sum(_one(pipeline, reader, number, seconds) for number in range(samples))
    reader.close()
    torch.set_num_threads(threads)
    with closing(pipeline.start()) as batches:
        next(batches)
        begin, count = time.perf_counter(), 0
        while count < samples:
            count += len(next(iter(next(batches).batch.values())))
        spent = time.perf_counter() - begin
    return Timing(used, seconds, pipeline.workers, count / spent)


def _one(pipeline: Pipeline, reader: ShardReader, number: int, seconds: dict[str, float]) -> bool:
    plan, before = pipeline.plan, time.perf_counter()
    spent: dict[str, float] = {}

    def lap(stage: str) -> None:
        nonlocal before
        now = time.perf_counter()
        spent[stage], before = now - before, now

    try:
        pipeline.example(reader, plan.at(number % plan.streams, number // plan.streams), lap)
    except BadSampleError:
        return False
    for stage, value in spent.items():
        seconds[stage] = seconds.get(stage, 0.0) + value
    return True
