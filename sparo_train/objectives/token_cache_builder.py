"""Tokens of frozen models for a data set, computed in parts for `objective.cache`. Forwards have fixed contents, whichever rank computes them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..core.contracts import DeviceContext
from ..core.distributed import Ranks
from ..core.errors import BadSampleError, DataError, SparoError
from ..data.read.token_cache import TokenCache
from ..data.read.workers import WorkerItems
from ..data.sources.base import Source, Storage
from ..models.clip_towers import layer_index
from ..models.weight_files.weights import weights_sha256

logger = logging.getLogger(__name__)

_PART, _IMAGES, _TEXTS = 1024, 64, 256  # samples per part; images and captions per forward
_LOG_EVERY = 64  # parts per rank between two log lines

Encode = Callable[[Tensor], Tensor]


class Prepared(NamedTuple):
    """Input of a tower: a digest, and pixels (3, S, S) uint8 or ids (T,) int64."""

    digest: bytes
    value: np.ndarray


Prepare = Callable[[dict[str, bytes], Source], list[Prepared]]  # returns the inputs in a sample's members


class SampleRange(NamedTuple):
    """Samples first..last-1 of a storage, which form one part of the token cache."""

    source: Source
    storage: Storage
    first: int
    last: int

    def name(self, kind: str) -> str:
        """Return the name of its `image` or `text` part, derived from the content, so that it never matches a part of other data."""
        # Include the members that are read, because other captions of the same shard make another part.
        s, c = self.storage, self.source.config
        read = c.image_keys if kind == "image" else (c.caption_key, c.captions)
        facts = (Path(s.url).name, len(s), s.digest(), s.sampled_hash(), s.content_hash(), read)
        return f"{hashlib.sha256(repr(facts).encode(errors='surrogateescape')).hexdigest()[:32]}-{self.first:08d}"


def sample_ranges(sources: Sequence[Source]) -> list[SampleRange]:
    """Return all samples that are read, in parts."""
    return [
        SampleRange(source, storage, first, min(first + _PART, len(storage)))
        for source in sources
        if source.config.weight
        for storage in source.storages
        for first in range(0, len(storage), _PART)
    ]


def fill_token_cache(
    token_cache: TokenCache,
    kind: str,
    ranges: Sequence[SampleRange],
    ranks: Ranks,
    start: Callable[[], AbstractContextManager[Callable[[SampleRange], None]]],
    size_note: Callable[[int], str] = lambda samples: "",
) -> None:
    """Compute the parts that a cache lacks, distributed over the ranks, and open it; all ranks call this together.

    Args:
        token_cache: the cache.
        kind: `image` or `text`.
        ranges: all samples that are read.
        ranks: this process among the ranks.
        start: enters a context that gives the function which computes and writes a part.
        size_note: returns the disk space of this many samples in words, for the log.

    Raises:
        DataError: the folder cannot be written, or tokens are not finite.
    """
    missing = ranks.rank0_broadcast(
        lambda: [n for n, sample_range in enumerate(ranges) if not token_cache.has(sample_range.name(kind))]
    )
    if missing:
        samples = sum(ranges[n].last - ranges[n].first for n in missing)
        logger.info(
            f"objective.cache: computing {kind} tokens for {samples:,} samples{size_note(samples)}, in {token_cache.folder}"
        )
        with start() as compute:
            # A round ends for all ranks together, so that none waits longer than for one part.
            for number, begin in enumerate(range(0, len(missing), ranks.size), 1):
                own = [ranges[n] for n in missing[begin + ranks.rank : begin + ranks.rank + 1]]
                ranks.call_on_all(lambda o=own: [compute(sample_range) for sample_range in o])
                if number % _LOG_EVERY == 0:
                    logger.info(f"objective.cache: computed {begin + ranks.size:,} of {len(missing):,} parts")
    # Open it in this process, before workers are forked, so that they share the index.
    ranks.call_on_all(lambda: token_cache.open([sample_range.name(kind) for sample_range in ranges]))


def cache_image_tokens(
    token_cache: TokenCache, sample_range: SampleRange, prepare: Prepare, encode: Encode, workers: int
) -> None:
    """Compute and write the tokens of a part's images. Raises `DataError`."""
    entries: dict[bytes, np.ndarray] = {}
    with closing(_iter_prepared(sample_range, prepare, workers)) as batches:
        for batch in batches:
            # Equal images in a part are computed once.
            fresh = {p.digest: p.value for p in batch if p.digest not in entries}
            if fresh:
                entries |= dict(
                    zip(fresh, encode(torch.from_numpy(np.stack(list(fresh.values())))).numpy(), strict=True)
                )
    token_cache.write(sample_range.name("image"), list(entries), list(entries.values()))


def cache_text_tokens(
    token_cache: TokenCache, sample_range: SampleRange, prepare: Prepare, encode: Encode, workers: int
) -> None:
    """Compute and write the tokens of a part's captions, up to and including EOS. Raises `DataError`."""
    with closing(_iter_prepared(sample_range, prepare, workers)) as batches:
        ids = {p.digest: p.value for batch in batches for p in batch}
    entries: dict[bytes, np.ndarray] = {}
    # Group captions of similar lengths: under the causal mask, padding after the end changes nothing.
    rest = iter(sorted(ids, key=lambda digest: (len(ids[digest]), digest)))
    while group := list(islice(rest, _TEXTS)):
        rows = torch.zeros(len(group), len(ids[group[-1]]), dtype=torch.int64)
        for row, digest in zip(rows, group, strict=True):
            row[: len(ids[digest])] = torch.from_numpy(ids[digest])
        for tokens, digest in zip(encode(rows).numpy(), group, strict=True):
            entries[digest] = tokens[: len(ids[digest])]
    token_cache.write(sample_range.name("text"), list(entries), list(entries.values()))


@contextmanager
def on_engine_device(model: nn.Module, forward: Encode, device_context: DeviceContext) -> Iterator[Encode]:
    """Move a model to an engine's device and return `forward` in its precision, with results on the CPU; the model moves back afterwards."""
    was, home = model.training, next(model.parameters()).device
    device_context.limit_threads()
    model.to(device_context.device).eval()

    def encode(x: Tensor) -> Tensor:
        # fp32 on its way to the host; the caller chooses the stored dtype.
        with torch.no_grad(), device_context.autocast():
            return forward(x.to(device_context.device)).float().cpu()

    try:
        yield encode
    finally:
        model.to(home).train(was)


def tower_facts(tower: nn.Module, sizes: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return everything that determines a tower's tokens: weights of its blocks and of the layers before them, its sizes, the precision."""
    count = len(tower.resblocks)  # type: ignore[arg-type]
    # Only the layers before the tokens, because another readout can use the same tokens.
    weights = weights_sha256(tower.state_dict(), lambda name: layer_index(name, count) <= count)
    return {"weights": weights, "blocks": count, "sizes": sizes, "precision": precision}


class _SampleDataset(Dataset[list[Prepared]]):
    """Samples of a run; torch requests several at once. Errors of samples are returned, not raised."""

    def __init__(self, sample_range: SampleRange, prepare: Prepare):
        self.sample_range, self.prepare = sample_range, prepare

    def __getitems__(self, numbers: Sequence[int]) -> list[Prepared] | SparoError:
        prepared_items: list[Prepared] = []
        for number in numbers:
            try:
                prepared_items += self.prepare(self.sample_range.storage.read(number)[1], self.sample_range.source)
            except BadSampleError:  # training meets the same sample, and counts it
                continue
            except SparoError as error:
                return error
            except OSError as error:  # the error may be temporary, and the part would stay without this sample
                return DataError(
                    f"{self.sample_range.storage.url}: sample number {number} cannot be read ({error}). Start again."
                )
        return prepared_items


def _iter_prepared(sample_range: SampleRange, prepare: Prepare, workers: int) -> Any:
    numbers = [
        list(range(at, min(at + _IMAGES, sample_range.last)))
        for at in range(sample_range.first, sample_range.last, _IMAGES)
    ]
    return WorkerItems(_SampleDataset(sample_range, prepare), workers, _identity, numbers)


def _identity(item: Any) -> Any:
    return item
