"""Tokens of frozen towers for a data set, computed in parts for `objective.cache`. Forwards have fixed contents, whichever rank computes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..core.contracts import DeviceContext
from ..core.errors import BadSampleError, DataError, SparoError
from ..data.read.token_cache import TokenCache
from ..data.read.workers import WorkerItems
from ..data.sources.base import Source, Storage
from ..models.clip_towers import layer_of
from ..models.weight_files.weights import weights_sha256

_PART, _IMAGES, _TEXTS = 1024, 64, 256  # samples per part; images and captions per forward

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


def cache_image_tokens(
    token_cache: TokenCache, sample_range: SampleRange, prepare: Prepare, encode: Encode, workers: int
) -> None:
    """Compute and write the tokens of a part's images. Raises `DataError`."""
    entries: dict[bytes, np.ndarray] = {}
    with closing(_prepared(sample_range, prepare, workers)) as batches:
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
    with closing(_prepared(sample_range, prepare, workers)) as batches:
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
def token_cache_builder(tower: nn.Module, device_context: DeviceContext) -> Iterator[Encode]:
    """Return the tower's blocks on an engine's device, in its precision, as functions that encode; the tower moves back afterwards."""
    was, home = tower.training, next(tower.parameters()).device
    device_context.limit_threads()
    tower.to(device_context.device).eval()

    def encode(x: Tensor) -> Tensor:
        # fp32 on its way to the host; the caller chooses the stored dtype.
        with torch.no_grad(), device_context.autocast():
            return tower.hidden(x.to(device_context.device)).float().cpu()  # type: ignore[operator]

    try:
        yield encode
    finally:
        tower.to(home).train(was)


def tower_facts(tower: nn.Module, sizes: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return everything that determines a tower's tokens: weights of its blocks and of the layers before them, its sizes, the precision."""
    count = len(tower.resblocks)  # type: ignore[arg-type]
    # Only the layers before the tokens, because another readout can use the same tokens.
    weights = weights_sha256(tower.state_dict(), lambda name: layer_of(name, count) <= count)
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


def _prepared(sample_range: SampleRange, prepare: Prepare, workers: int) -> Any:
    numbers = [
        list(range(at, min(at + _IMAGES, sample_range.last)))
        for at in range(sample_range.first, sample_range.last, _IMAGES)
    ]
    return WorkerItems(_SampleDataset(sample_range, prepare), workers, _identity, numbers)


def _identity(item: Any) -> Any:
    return item
