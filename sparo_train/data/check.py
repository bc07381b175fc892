"""`sparo data check`: count, look for duplicates, decode everything once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from .samples import BadSampleError, caption, decode_image, image_bytes
from .shards import ShardReader
from .sources import SourceConfig


class ShardReport(NamedTuple):
    """What one shard holds. `bad`: (key, reason) of unusable samples; hashes: 64 bits of each key, image and caption."""

    url: str
    samples: int
    intact: bool
    bad: list[tuple[str, str]]
    keys: np.ndarray
    images: np.ndarray
    captions: np.ndarray


class Report(NamedTuple):
    """All shards of a source; duplicates count every copy after the first."""

    shards: list[ShardReport]
    duplicate_keys: int
    duplicate_images: int
    duplicate_captions: int

    @property
    def samples(self) -> int:
        return sum(s.samples for s in self.shards)

    def reasons(self) -> dict[str, int]:
        """Unusable samples by reason, truncated shards included."""
        found = Counter(reason for s in self.shards for _, reason in s.bad)
        broken = sum(not s.intact for s in self.shards)
        return {**found, **({"truncated tar": broken} if broken else {})}


def check(
    urls: Sequence[str], config: SourceConfig, processes: int = 2, report: Callable[[int], None] | None = None
) -> Report:
    """Read, decode and hash every sample of the given shards; `report` is called with the number of shards done."""
    shards = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for shard in pool.map(check_shard, urls, [config] * len(urls)):
            shards.append(shard)
            if report:
                report(len(shards))
    return Report(shards, *(_duplicates([getattr(s, name) for s in shards]) for name in ("keys", "images", "captions")))


def check_shard(url: str, config: SourceConfig) -> ShardReport:
    """One shard of `check`."""
    reader = ShardReader()
    index = reader.index(url)
    bad: list[tuple[str, str]] = []
    hashes: tuple[list[int], list[int], list[int]] = ([], [], [])
    for ordinal in range(len(index)):
        key, fields = reader.read(url, ordinal)
        hashes[0].append(_hash(key.encode()))
        try:
            text = caption(fields, config)
            data = image_bytes(fields, config.image_keys)
            hashes[1].append(_hash(data))
            hashes[2].append(_hash(text.encode()))
            decode_image(data)
        except BadSampleError as problem:
            bad.append((key, str(problem)))
    reader.close()
    return ShardReport(url, len(index), index.intact, bad, *(np.array(h, dtype=np.uint64) for h in hashes))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _duplicates(parts: Sequence[np.ndarray]) -> int:
    joined = np.concatenate(parts) if parts else np.zeros(0)
    return len(joined) - len(np.unique(joined))
