"""`sparo data bench`: samples per second of one worker, and where its time goes."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from ..core.errors import BadSampleError
from ..core.rng import generator
from .loader import ClipPipeline
from .samples import caption, decode_image, image_bytes
from .shards import ShardReader
from .transforms import train_pixels

STAGES = ("read", "decode", "augment", "tokenise")


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


def bench(pipeline: ClipPipeline, samples: int = 512) -> Timing:
    """Time the stages in this process on one thread, then the pipeline with its workers, each over `samples` in plan order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    done: Counter[str] = Counter()
    reader = ShardReader()
    for number in range(samples):
        _one(pipeline, reader, number, seconds, done)
    reader.close()
    torch.set_num_threads(threads)
    with closing(pipeline.start()) as batches:
        next(batches)
        begin, count = time.perf_counter(), 0
        while count < samples:
            count += len(next(batches).batch["image"])
        spent = time.perf_counter() - begin
    return Timing(done["used"], seconds, pipeline.workers, count / spent)


def _one(
    pipeline: ClipPipeline, reader: ShardReader, number: int, seconds: dict[str, float], done: Counter[str]
) -> None:
    plan, config = pipeline.plan, pipeline.config
    ref = plan.at(number % plan.streams, number // plan.streams)
    source = pipeline.sources[ref.source]
    marks = [time.perf_counter()]
    try:
        _, fields = reader.read(source.urls[ref.shard], ref.ordinal)
        marks.append(time.perf_counter())
        image = decode_image(
            image_bytes(fields, source.config.image_keys),
            2 * pipeline.image_size if config.scaled_decoding else None,
        )
        marks.append(time.perf_counter())
        rng = generator(pipeline.seed, "augment", *ref)
        pixels = train_pixels(image, pipeline.image_size, config.crop_scale, config.hflip, rng)
        np.ascontiguousarray(pixels.transpose(2, 0, 1))
        marks.append(time.perf_counter())
        pipeline.tokenize(caption(fields, source.config))
        marks.append(time.perf_counter())
    except BadSampleError:
        return
    for stage, before, after in zip(STAGES, marks, marks[1:], strict=False):
        seconds[stage] += after - before
    done["used"] += 1
