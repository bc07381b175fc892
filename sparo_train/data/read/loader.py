"""The training pipeline: plan -> read -> prepare -> batches with a cursor."""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ...core.contracts import Cursor, DeviceContext, LoaderBatch, Objective
from ...core.disk.metrics import Sample
from ...core.distributed import Ranks
from ...core.errors import BadSampleError, ConfigError, DataError, SparoError
from ...core.rng import generator
from ..decode.bands import as_rgb
from ..servers.cache import SampleCache
from ..sources.base import DataConfig, Source, close_storages, open_source
from ..sources.fingerprint import fingerprint
from ..sources.shards import use_cache
from .ahead import ReadAhead
from .bad_samples import refuse_broken
from .batches import Batches
from .plan import Plan, SampleRef
from .ring import Place, Ring
from .workers import WorkerItems

_CPU = torch.device("cpu")
OnStage = Callable[[str], object]  # called after each stage of the work on a sample, with the stage's name


def ignore_stage(_stage: str) -> None:
    """Ignore a stage, if nothing measures time."""


class Examples(ABC):
    """Content of the batches of a pipeline; everything except `finish` runs in the loader's workers."""

    image_size: int
    # Facts that a resumed run compares in addition to its data, by name.
    fingerprint: Mapping[str, Any] = MappingProxyType({})
    reads_model = False  # examples depend on the objective's weights: `ready` is called first

    def ready(  # noqa: B027  most examples do not depend on the model
        self,
        objective: Objective,
        sources: Sequence[Source],
        device_context: DeviceContext,
        ranks: Ranks,
    ) -> None:
        """Prepare on all ranks together before the first batch, if `reads_model`; `objective` has its initial weights.

        Args:
            objective: the objective.
            sources: opened sources.
            device_context: the engine's device and precision.
            ranks: this process among the ranks.
        """

    @abstractmethod
    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        """Return one example from a sample's members, with the random stream of this visit; raises `BadSampleError` with the reason."""

    @abstractmethod
    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Stack examples to a batch of tensors with one row each."""

    def finish(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Finish a rank's whole batch with operations that need all of it."""
        return batch

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """Return the first images of a batch for display; default: from `image` (B, 3, S, S) uint8, without captions."""
        return as_samples(batch["image"][:count]) if "image" in batch else []


def as_samples(images: Tensor, captions: Sequence[str] = ()) -> list[Sample]:
    """Return samples for display from (n, C, S, S) uint8, with captions if there are any; see `as_rgb`."""
    rows = as_rgb(images.permute(0, 2, 3, 1).cpu().numpy())
    return [Sample(row, captions[i] if captions else "") for i, row in enumerate(rows)]


class WorkerBatch(NamedTuple):
    """One worker's part of a batch: an example of each of its rows, and the rows' next positions."""

    batch: dict[str, Tensor] | Place
    positions: list[int]
    skipped: dict[tuple[str, str], int]
    first_keys: dict[tuple[str, str], str]  # of skipped samples: one key per shard and reason


class _Workers(IterableDataset[WorkerBatch | SparoError]):
    """Iterator inside a loader worker over its rows in turn, without end.

    User errors are returned instead of raised, because torch would bury their message in the worker's traceback.
    """

    def __init__(self, pipeline: Pipeline, positions: Sequence[int], ring: Ring):
        self.pipeline, self.positions, self.ring = pipeline, positions, ring

    def __iter__(self) -> Iterator[WorkerBatch | SparoError]:
        info = get_worker_info()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        p = self.pipeline
        at = {row: self.positions[row] for row in p.rows_of_worker(number, of)}
        ahead = ReadAhead(p.plan, p.sources, at, p.per_stream)
        try:
            for item in count():
                skipped, keys = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
                examples = [self._take(row, at, ahead, skipped, keys) for row in at]
                batch = p.examples.stack(examples)
                if info:
                    batch = self.ring.put(number, item, batch)
                yield WorkerBatch(batch, list(at.values()), dict(skipped), keys)
        except SparoError as error:
            yield error
        finally:
            close_storages()

    def _take(
        self,
        row: int,
        at: dict[int, int],
        ahead: ReadAhead,
        skipped: Counter[tuple[str, str]],
        keys: dict[tuple[str, str], str],
    ) -> Any:
        """Return the next usable example of a row."""
        p, stream = self.pipeline, row // self.pipeline.per_stream
        # Two passes, because every window is read as a whole once, wherever the stream started.
        for _ in range(2 * p.plan.stream_length(stream) + 1):
            position = at[row]
            ahead.advance(stream, position)
            ref = p.plan.sample_at(stream, position)
            # Before reading, so that a failing sample counts as read.
            at[row] = position + p.per_stream
            try:
                return p.example(ref)
            except BadSampleError as bad:
                what = (p.sources[ref.source].storages[ref.shard].url, str(bad))
                skipped[what] += 1
                key = bad.key or f"number {ref.ordinal}"
                keys.setdefault(what, f"{key} ({bad.detail})" if bad.detail else key)
        worst = ", ".join(f"{url} ({reason}: {n})" for (url, reason), n in skipped.most_common(3))
        raise DataError(f"data: a whole pass over stream {stream} has no usable sample: {worst}. {_advice(worst)}")


def number_of_streams(config: DataConfig, batch_size: int, world_size: int) -> int:
    """Return the number of streams that the data is divided into.

    Raises:
        ConfigError: the streams or the ranks cannot share a batch evenly.
    """
    streams = config.streams or default_streams(batch_size)
    if batch_size % streams:
        raise ConfigError(f"data.streams={streams} does not divide batch_size={batch_size}")
    if batch_size % world_size:
        raise ConfigError(
            f"batch_size={batch_size}: {world_size} ranks cannot share it evenly. Use a multiple of {world_size}, or a number of ranks "
            f"that divides {batch_size}."
        )
    return streams


class Pipeline:
    """Batches in the plan's order.

    Args:
        config: the recipe's `data` block.
        batch_size: examples per global batch.
        examples: content of the batches.
        seed: the run's seed.
        rank, world_size: this process reads its contiguous block of the rows of each global batch.

    Raises:
        ConfigError: `data.streams` or the number of ranks does not divide the batch size.
        DataError: a source has no samples.
    """

    def __init__(
        self, config: DataConfig, batch_size: int, examples: Examples, seed: int, rank: int = 0, world_size: int = 1
    ):
        streams = number_of_streams(config, batch_size, world_size)
        self.rank, self.rows = rank, range(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self.config, self.batch_size, self.examples, self.seed = config, batch_size, examples, seed
        self.sources = [open_source(name, source) for name, source in config.sources.items()]
        if config.cache is not None:
            use_cache(SampleCache(config.cache), [s for source in self.sources for s in source.storages])
        whole = [[config.whole_groups and storage.is_group for storage in s.storages] for s in self.sources]
        self.plan = Plan(
            [[len(storage) for storage in s.storages] for s in self.sources],
            [s.config.weight for s in self.sources],
            seed,
            streams,
            config.chunk,
            config.shuffle_window,
            whole,
        )
        self.per_stream = batch_size // streams
        # A worker without a row would have nothing to return.
        self.workers = min(config.workers, len(self.rows))
        plan = {"streams": streams, "chunk": config.chunk, "window": config.shuffle_window, "seed": seed}
        if any(map(any, whole)):
            plan["whole_groups"] = True
        self.fingerprint: dict[str, Any] = {**fingerprint(self.sources), "plan": {**plan, **examples.fingerprint}}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """Return the first images of this rank's batch, for display."""
        return self.examples.preview(batch, count)

    def rows_of_worker(self, number: int, workers: int) -> range:
        """Return the rows of this rank's batches that worker `number` of `workers` reads."""
        n, own = self.per_stream, self.rows
        streams = range(own.start // n, -(-own.stop // n))
        if len(streams) < workers:
            return own[number * len(own) // workers : (number + 1) * len(own) // workers]
        # Whole streams where possible, because then neighbouring samples are requested together.
        first, end = (streams.start + i * len(streams) // workers for i in (number, number + 1))
        return range(max(own.start, first * n), min(own.stop, end * n))

    def _next_positions(self, cursor: Cursor | None) -> list[int]:
        """Return the next position of every row of a global batch.

        Position p of a stream, which a cursor of one position per stream has, stands for rows that continue with p, p+1, …
        """
        given, n = cursor.positions if cursor else (0,) * self.plan.streams, self.per_stream
        before = len(given) // self.plan.streams
        if len(given) % self.plan.streams or not before or n % before:
            raise DataError(
                f"batch_size={self.batch_size}: cannot resume with this size. Because samples were skipped, the "
                f"checkpoint has a separate position in the data for each of {len(given)} rows of a batch. Use a multiple "
                f"of {len(given)}."
            )
        # If a batch has more rows than before, each row is divided: its next samples go to the new rows in turn.
        groups = [given[i : i + before] for i in range(0, len(given), before)]
        return [p + step * before for group in groups for step in range(n // before) for p in group]

    def start(self, cursor: Cursor | None = None, device: torch.device = _CPU) -> Batches:
        """Start the workers. Returns this rank's batches from the beginning or after `cursor` (of all ranks), without end.

        A batch's cursor contains this rank's rows; the positions of all ranks in order are the whole cursor.

        Args:
            cursor: position in all streams; None: the beginning.
            device: batches for a GPU are in pinned memory.

        Raises:
            DataError: too many shards are incomplete, or the cursor does not fit this batch size.
        """
        positions = self._next_positions(cursor)
        broken = refuse_broken(self.sources, self.config)
        # A run's checkpoints carry these counts from then on, so they are added once in its life, on one rank.
        news = cursor is None and self.rank == 0
        first = Counter({(d.url, d.reason): d.lost_samples for d in broken} if news else {})

        def join(parts: Sequence[WorkerBatch], cat: Callable[[list[Tensor]], Tensor]) -> LoaderBatch:
            nonlocal first
            joined, first = self._join(parts, ring, cat, first), Counter()
            return joined

        ring = Ring(self.workers, self.config.prefetch + 1)
        parts = WorkerItems(_Workers(self, positions, ring), self.workers, _identity, None, self.config.prefetch)
        return Batches(parts, max(1, self.workers), join, device)

    def example(self, ref: SampleRef, on_stage: OnStage = ignore_stage) -> Any:
        """Read and prepare one visit of a sample, with the random stream of that visit.

        Raises:
            BadSampleError: for any error that the sample causes, named by type and location if it is not ours. One
                sample must not end a run, and if the code fails on all samples, the limit on bad samples ends it soon.
        """
        source, key = self.sources[ref.source], ""
        try:
            key, fields = source.storages[ref.shard].read(ref.ordinal)
            on_stage("read")
            return self.examples.prepare(fields, source, generator(self.seed, "augment", *ref), on_stage)
        except SparoError:
            raise
        except BadSampleError as bad:
            bad.key = key
            raise
        # Any error of a decoder concerns the sample; an error of sparo's concerns the recipe.
        except Exception as error:
            raise BadSampleError(_describe_location(error), key) from error

    def _join(
        self,
        parts: Sequence[WorkerBatch],
        ring: Ring,
        cat: Callable[[list[Tensor]], Tensor],
        skipped: Counter[tuple[str, str]],
    ) -> LoaderBatch:
        """Return a batch of its workers' parts, with the counts of `skipped` in addition to theirs."""
        tensors = [ring.get(part.batch) for part in parts]
        batch = self.examples.finish({key: cat([some[key] for some in tensors]) for key in tensors[0]})
        positions = tuple(at for p in parts for at in p.positions)
        return LoaderBatch(
            batch,
            Cursor(positions, self.per_stream),
            dict(sum((Counter(p.skipped) for p in parts), skipped)),
            {what: key for p in parts for what, key in p.first_keys.items()},
        )


def default_streams(batch_size: int) -> int:
    """Return the default number of streams: 16, or more for batches over 256 (up to 512), so that many ranks and workers read whole streams."""
    target = 1 << max(4, min(9, (batch_size // 8).bit_length() - 1))
    # It must divide the batch, because a batch takes the same number of samples from each stream.
    return math.gcd(batch_size, target)


def _identity(part: WorkerBatch | SparoError) -> WorkerBatch | SparoError:
    """Replace torch's default_convert: a part contains tensors already."""
    return part


def _describe_location(error: Exception) -> str:
    """Return the location of an error as a countable reason: its text may contain the sample's own values and would differ for each."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"


def _advice(reasons: str) -> str:
    """Return advice if all samples of a stream are unusable for a reason that a key can fix."""
    if "pixel range" in reasons:
        return "Set data.pixel_range; `sparo data check` lists the values of each picture."
    if "missing caption" in reasons:
        return "Set data.sources.NAME.caption_key to the file extension or column of the captions."
    return (
        "Repair the samples that `sparo data check` lists, or lower data.streams, so that each stream has more samples."
    )
