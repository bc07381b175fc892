"""The training pipeline: plan -> read -> prepare -> batches that carry their cursor."""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
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
from .bad_samples import refuse_broken
from .plan import Plan, SampleRef
from .shards import close_reader
from .sources import DataConfig, Source, fingerprint, open_source
from .workers import iterate_in_workers

OnStage = Callable[[str], object]  # called behind a stage of the work on a sample, with its name


def ignore_stage(_stage: str) -> None:
    """Nobody is timing."""


class Examples(ABC):
    """What the batches of a pipeline are made of; runs in the loader's workers, all but `finish`."""

    image_size: int
    reads_model = False  # examples are made with the objective's weights: `ready` comes first

    def ready(  # noqa: B027  most are made of what was read alone
        self,
        objective: Objective,
        sources: Sequence[Source],
        device_context: DeviceContext,
        ranks: Ranks,
    ) -> None:
        """Called on all ranks together before the first batch, where `reads_model`; `objective` has the weights that it begins with.

        Args:
            device_context: the engine's device and precision.
        """

    @abstractmethod
    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        """One example from a sample's members, with the random stream of this visit; raises `BadSampleError` with the reason."""

    @abstractmethod
    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Examples to a batch: tensors with one row each."""

    def finish(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What can only be done to a rank's whole batch."""
        return batch

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """The first images of a batch as a person sees them; default: of `image` (B, 3, S, S) uint8, without captions."""
        return as_samples(batch["image"][:count]) if "image" in batch else []


def as_samples(images: Tensor, captions: Sequence[str] = ()) -> list[Sample]:
    """(n, 3, S, S) uint8, with captions where there are any."""
    rows = images.permute(0, 2, 3, 1).cpu().numpy()
    return [Sample(row, captions[i] if captions else "") for i, row in enumerate(rows)]


class WorkerBatch(NamedTuple):
    """A worker's share of a batch: of its streams, `per_stream` examples each, and where the streams stand now."""

    batch: dict[str, Tensor]
    positions: list[int]
    skipped: dict[tuple[str, str], int]
    first_keys: dict[tuple[str, str], str]  # of what was skipped: one sample for each shard and reason


class _Workers(IterableDataset[WorkerBatch | SparoError]):
    """Runs inside a loader worker: its streams, one after another, for ever. A user's problem is delivered, not raised:
    torch would bury its message in the worker's traceback."""

    def __init__(self, pipeline: Pipeline, positions: Sequence[int]):
        self.pipeline, self.positions = pipeline, positions

    def __iter__(self) -> Iterator[WorkerBatch | SparoError]:
        info = get_worker_info()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        p = self.pipeline
        # Whole streams to each worker: a stream is read by one process, so its place is one number.
        streams = p.own[number * len(p.own) // of : (number + 1) * len(p.own) // of]
        at = {stream: self.positions[stream] for stream in streams}
        try:
            while True:
                skipped, keys = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
                examples = [e for stream in streams for e in self._take(stream, at, skipped, keys)]
                yield WorkerBatch(p.examples.stack(examples), [at[stream] for stream in streams], dict(skipped), keys)
        except SparoError as error:
            yield error
        finally:
            close_reader()

    def _take(
        self, stream: int, at: dict[int, int], skipped: Counter[tuple[str, str]], keys: dict[tuple[str, str], str]
    ) -> Iterator[Any]:
        p, length = self.pipeline, self.pipeline.plan.stream_length(stream)
        for _ in range(p.per_stream):
            # Two passes: every window is met whole once, wherever the stream stood.
            for _tries in range(2 * length + 1):
                position = at[stream]
                # At a window's first sample: its order is random, and all of it is needed soon.
                if position % length % p.plan.window == 0:
                    for source, shard, first, last in p.plan.window_chunks(stream, position):
                        p.sources[source].storages[shard].read_ahead(first, last)
                ref = p.plan.at(stream, position)
                # Before the read: a sample that fails is behind us, too.
                at[stream] = position + 1
                try:
                    yield p.example(ref)
                    break
                except BadSampleError as bad:
                    what = (p.sources[ref.source].storages[ref.shard].url, str(bad))
                    skipped[what] += 1
                    key = bad.key or f"number {ref.ordinal}"
                    keys.setdefault(what, f"{key} ({bad.detail})" if bad.detail else key)
            else:
                worst = ", ".join(f"{url} ({reason}: {n})" for (url, reason), n in skipped.most_common(3))
                raise DataError(
                    f"data: a whole pass over stream {stream} has no usable sample: {worst}{_advice(worst)}"
                )


def shared_streams(config: DataConfig, batch_size: int, world_size: int) -> int:
    """How many streams the data is cut into.

    Raises:
        ConfigError: they do not divide the batch, or the ranks do not divide them.
    """
    streams = config.streams or default_streams(batch_size)
    if batch_size % streams:
        raise ConfigError(f"data.streams={streams} does not divide batch_size={batch_size}")
    if streams % world_size:
        raise ConfigError(
            f"data.streams={streams}: {world_size} ranks cannot share them evenly; "
            f"use a world size that divides them, or a multiple of it for data.streams (which must divide batch_size={batch_size})"
        )
    return streams


class Pipeline:
    """Batches in the plan's order.

    Args:
        config: the recipe's `data` block.
        batch_size: examples per global batch.
        examples: what they are and how they are made.
        seed: the run's seed.
        rank, world_size: this process reads its contiguous block of the streams; the global batch is the ranks' batches in order.

    Raises:
        ConfigError: `data.streams` does not divide the batch.
        DataError: a source has no samples; from `start`: too many shards are not whole.
    """

    def __init__(
        self, config: DataConfig, batch_size: int, examples: Examples, seed: int, rank: int = 0, world_size: int = 1
    ):
        streams = shared_streams(config, batch_size, world_size)
        self.rank, self.own = rank, range(rank * streams // world_size, (rank + 1) * streams // world_size)
        self.config, self.batch_size, self.examples, self.seed = config, batch_size, examples, seed
        self.sources = [open_source(name, source) for name, source in config.sources.items()]
        self.plan = Plan(
            [[len(storage) for storage in s.storages] for s in self.sources],
            [s.config.weight for s in self.sources],
            seed,
            streams,
            config.chunk,
            config.shuffle_window,
        )
        self.per_stream = batch_size // streams
        # A worker without a stream would have nothing to deliver.
        self.workers = min(config.workers, len(self.own))
        plan = {"streams": streams, "chunk": config.chunk, "window": config.shuffle_window, "seed": seed}
        self.fingerprint: dict[str, Any] = {**fingerprint(self.sources), "plan": plan}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """The first images of a batch of this rank's, as a person sees them."""
        return self.examples.preview(batch, count)

    def start(self, cursor: Cursor | None = None) -> Generator[LoaderBatch, None, None]:
        """This rank's batches from the beginning or behind `cursor` (of all streams), without end.

        A delivery's cursor holds this rank's streams; the ranks' positions in order are the whole cursor.
        """
        positions = cursor.positions if cursor else (0,) * self.plan.streams
        broken = refuse_broken(self.sources, self.config)
        # The rest of its life a run carries these counts in its checkpoints.
        # Told once in the life of a run, and by one rank.
        news = cursor is None and self.rank == 0
        first = Counter({(d.url, d.reason): d.lost_samples for d in broken} if news else {})
        with closing(
            iterate_in_workers(_Workers(self, positions), self.workers, _identity, None, self.config.prefetch)
        ) as parts:
            while True:
                delivery = self._assemble([next(parts) for _ in range(max(1, self.workers))])
                yield delivery._replace(skipped=dict(first + Counter(delivery.skipped))) if first else delivery
                first = Counter()

    def example(self, ref: SampleRef, on_stage: OnStage = ignore_stage) -> Any:
        """Read and prepare one visit of a sample, with the random stream of that visit.

        Raises:
            BadSampleError: whatever this sample made fail, named by its type and place where it is no error of ours: one sample
                must not end a run, and a mistake in the code that prepares all of them soon has no usable one.
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
        # Whatever a decoder raises belongs to the sample; an error of ours belongs to the recipe.
        except Exception as error:
            raise BadSampleError(_where(error), key) from error

    def _assemble(self, parts: Sequence[WorkerBatch]) -> LoaderBatch:
        batch = self.examples.finish({key: torch.cat([p.batch[key] for p in parts]) for key in parts[0].batch})
        if torch.cuda.is_available():  # here, because what is concatenated or cut is not pinned any more
            batch = {key: value.pin_memory() for key, value in batch.items()}
        positions = tuple(at for p in parts for at in p.positions)
        return LoaderBatch(
            batch,
            Cursor(positions),
            dict(sum((Counter(p.skipped) for p in parts), Counter())),
            {what: key for p in parts for what, key in p.first_keys.items()},
        )


def default_streams(batch_size: int) -> int:
    """16 streams, and more for batches over 256 (up to 512), so that many ranks and workers can share them; a divisor of the batch."""
    target = 1 << max(4, min(9, (batch_size // 8).bit_length() - 1))
    # A divisor of the batch, or a batch could not take the same number from each.
    return math.gcd(batch_size, target)


def _identity(part: WorkerBatch | SparoError) -> WorkerBatch | SparoError:
    """In place of torch's default_convert: a part holds tensors already."""
    return part


def _where(error: Exception) -> str:
    """A reason to count under: the text of an error may hold the sample's own, and would be a reason of its own for each."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"


def _advice(reasons: str) -> str:
    """Return what to do where all samples of a stream are unusable for a reason that a key removes."""
    if "pixel range" in reasons:
        return ". Set data.pixel_range; `sparo data check` lists the values of each picture."
    return ""
