"""Webdataset tars read by position: with the index of a shard, any of its samples is one read, and resuming replays nothing.

A sample is a sequence of members that share a key (`000001.jpg`, `000001.txt`, `000001.json`).
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from xxhash import xxh3_128_digest

from ...core.config import field, resumable_field
from ...core.errors import BadSampleError, DataError
from ...core.files import read_text, write_whole
from ..servers.cache import CachedFile, SampleCache
from ..servers.ranges import RangeReader
from ..servers.remote import find_shards, get_file_size, open_filesystem, refuse_several_splits, with_retries
from .base import SourceConfig, SourceKind, Storage, dotted_key, on_close
from .merged_index import MergedShard, read_merged_index, write_merged_index
from .shard_index import load_index
from .tar import ShardIndex, unpack


class ShardsConfig(SourceConfig):
    """Webdataset tars, by a path or an fsspec URL (`cc3m/{00000..00331}.tar`, `s3://bucket/{000..999}.tar`)."""

    kind: Literal["shards"] = field("shards", "Format of the data: an entry of sparo.sources.")
    shards: str | tuple[str, ...] = resumable_field(..., "Folder, glob, brace range, fsspec URL, or a list of these.")
    index: str | None = resumable_field(
        None,
        "File with the indexes of all shards, from `sparo data index --merge`. Without this file, the size of each "
        "shard is requested at every start.",
        examples=["data/index.safetensors"],
    )


logger = logging.getLogger(__name__)
_OPEN_SHARDS = 64
_SEQUENTIAL, _AT_ONCE = 3, 64  # samples that were read in order, after which the next ones are requested together


class ShardReader:
    """Random access to the samples of many shards.

    Local files are read with `pread` through a small set of handles, files on servers by byte ranges.
    """

    def __init__(self) -> None:
        self._handles: OrderedDict[str, io.FileIO | None] = OrderedDict()  # None: a file on a server
        self._ranges: RangeReader | None = None
        self._last_read, self._in_order = ("", -1), 0
        self._indexes: OrderedDict[str, ShardIndex] = OrderedDict()

    def read(
        self, url: str, ordinal: int, index: ShardIndex | None = None, cached: CachedFile | None = None
    ) -> tuple[str, dict[str, bytes]]:
        """Return the key and members of a sample of a tar.

        Args:
            url: the shard.
            ordinal: number of the sample in it.
            index: the shard's index; None: load it.
            cached: the shard in the node's cache, if it is remote and there is one.

        Raises:
            BadSampleError: these bytes are not the members of one sample.
            DataError: the shard cannot be read, or is shorter than its index says.
        """
        try:
            return unpack(self.read_bytes(url, ordinal, (self.index(url) if index is None else index).offsets, cached))
        except ValueError:
            raise BadSampleError("damaged tar or stale index") from None

    def read_bytes(self, url: str, ordinal: int, offsets: np.ndarray, cached: CachedFile | None = None) -> bytes:
        """Return the bytes of a sample of any file, which begins at `offsets[ordinal]` and ends at the next offset.

        Raises:
            DataError: the file cannot be read, or is shorter than the offsets say.
        """
        start, end = int(offsets[ordinal]), int(offsets[ordinal + 1])
        if not 0 <= start <= end:
            raise DataError(
                f"{url}: its index is damaged: it lists a sample at bytes {start} to {end}. Index it again with sparo data index."
            )
        if (stream := self._handle(url)) is None:
            data = cached.get(ordinal, start, end) if cached else None
            if data is None:
                self._request_in_order(url, ordinal, offsets)
                data = self._remote().read(url, start, end)
                if cached:
                    cached.put(ordinal, start, data)
        else:
            data = with_retries(url, lambda: os.pread(stream.fileno(), end - start, start))
        # The file was truncated or replaced by a shorter one after it was indexed, so later samples would be wrong,
        # too.
        if len(data) < end - start:
            raise DataError(
                f"{url}: is shorter than its index says, so the file changed after it was indexed. Remove its .idx.npy, then run the same command again."
            )
        return data

    def read_ahead(
        self, url: str, first: int, last: int, offsets: np.ndarray, cached: CachedFile | None = None
    ) -> None:
        """Request samples first..last-1, which will be read soon, from the kernel or from the server."""
        stream = self._handle(url)
        if stream is None:
            for begin, end in cached.missing_ranges(first, last) if cached else [(first, last)]:
                self._remote().announce(url, offsets[begin : end + 1].tolist())
        elif hasattr(os, "posix_fadvise"):
            start = int(offsets[first])
            os.posix_fadvise(stream.fileno(), start, int(offsets[last]) - start, os.POSIX_FADV_WILLNEED)

    def _request_in_order(self, url: str, ordinal: int, offsets: np.ndarray) -> None:
        """Announce the next samples to a caller that reads a whole shard without announcements, as checks and evaluations do."""
        self._in_order = self._in_order + 1 if self._last_read == (url, ordinal - 1) else 0
        self._last_read = (url, ordinal)
        if self._in_order >= _SEQUENTIAL and not self._remote().is_announced(url, int(offsets[ordinal])):
            self._remote().announce(url, offsets[ordinal : ordinal + _AT_ONCE + 1].tolist())

    def _remote(self) -> RangeReader:
        if self._ranges is None:
            self._ranges = RangeReader()
        return self._ranges

    def index(self, url: str) -> ShardIndex:
        if url not in self._indexes:
            self._indexes[url] = load_index(url)
            while len(self._indexes) > 16 * _OPEN_SHARDS:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(url)
        return self._indexes[url]

    def _handle(self, url: str) -> io.FileIO | None:
        if url not in self._handles:
            filesystem, path = open_filesystem(url)
            local = isinstance(filesystem, LocalFileSystem)
            self._handles[url] = with_retries(url, lambda: io.FileIO(path)) if local else None
            while len(self._handles) > _OPEN_SHARDS:
                # Thousands of shards and a limit of 1,024 open files: close the least recently used one, because
                # streams return to their shards.
                if oldest := self._handles.popitem(last=False)[1]:
                    oldest.close()
        self._handles.move_to_end(url)
        return self._handles[url]

    def close(self) -> None:
        for stream in self._handles.values():
            if stream is not None:
                stream.close()
        self._handles.clear()
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None


class RangeStorage(Storage):
    """Storage whose samples are byte ranges of one file.

    Attributes:
        cache: the node's cache; None for none.
    """

    cache: SampleCache | None = None
    _cached: CachedFile | None = None

    @property
    @abstractmethod
    def offsets(self) -> np.ndarray:
        """Return the first byte of each sample, and the end of the last one."""

    def cached(self) -> CachedFile | None:
        """Return the file in the node's cache, if it is remote and there is a cache."""
        if self._cached is None and self.cache is not None and "://" in self.url:
            self._cached = CachedFile(self.cache, self.url, *self.version())
        return self._cached

    @abstractmethod
    def version(self) -> tuple[bytes, int]:
        """Return bytes that differ for another version of the file, and its size in bytes."""

    def read_ahead(self, first: int, last: int) -> None:
        process_reader().read_ahead(self.url, first, last, self.offsets, self.cached())


def use_cache(cache: SampleCache, storages: Iterable[Storage]) -> None:
    """Set the cache of remote storages, and remove files of other data sets if their samples need the space."""
    remote = [s for s in storages if isinstance(s, RangeStorage) and "://" in s.url]
    if not remote:
        logger.warning("data.cache: has no effect, because no shards, MDS or LitData files of this run are on a server")
    for storage in remote:
        storage.cache = cache
    cache.reserve_space([file for storage in remote if (file := storage.cached()) is not None])


class Shard(RangeStorage):
    """A tar with its index."""

    def __init__(self, url: str, index: ShardIndex, sha256: str | None = None):
        self.url, self.index, self.intact = url, index, index.intact
        self._sha256 = sha256

    def __len__(self) -> int:
        return len(self.index)

    @property
    def offsets(self) -> np.ndarray:
        return self.index.offsets

    def version(self) -> tuple[bytes, int]:
        # The stamp, because another version of a file may have the same offsets, and a scan of a remote file reads no
        # content. xxh3, because the offsets of hundreds of millions of samples are gigabytes.
        return self.index.digest + self.index.stamp + xxh3_128_digest(self.offsets.data), int(self.offsets[-1]) if len(
            self
        ) else 0

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        return process_reader().read(self.url, number, self.index, self.cached())

    def sampled_hash(self) -> str:
        return self.index.digest.hex() if any(self.index.digest) else ""

    def content_hash(self) -> str | None:
        return recorded_hash(self.url) if self._sha256 is None else self._sha256 or None


def recorded_hash(url: str) -> str | None:
    """Return the SHA-256 of a local shard that `sparo data check --hash` stored next to it, if the shard was not modified since."""
    path = Path(url)
    sidecar = path.with_name(f"{path.name}.sha256")
    try:
        if "://" in url or sidecar.stat().st_mtime < path.stat().st_mtime:
            return None
        words = read_text(sidecar, DataError, 4096).split()
    except (OSError, DataError):
        return None
    return words[0] if words and re.fullmatch(r"[0-9a-f]{64}", words[0]) else None


def record_hash(url: str) -> str:
    """Hash a shard's content, and store the hash next to a local file in the format of sha256sum.

    Raises:
        DataError: the shard cannot be read, or its folder cannot be written.
    """
    filesystem, path = open_filesystem(url)

    def digest() -> str:
        with filesystem.open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    sha256 = with_retries(url, digest)
    try:
        if isinstance(filesystem, LocalFileSystem):
            write_whole(Path(path + ".sha256"), f"{sha256}  {Path(path).name}\n")
    except OSError as error:
        raise DataError(f"{path}.sha256: cannot be written ({error})") from None
    return sha256


_readers: dict[int, ShardReader] = {}  # by process, because a forked process must not move its parent's file positions


def process_reader() -> ShardReader:
    """Return this process's own reader, which is created at its first read."""
    return _readers.setdefault(os.getpid(), ShardReader())


@on_close
def close_reader() -> None:
    """Close this process's open handles; later reads open them again."""
    if reader := _readers.pop(os.getpid(), None):
        reader.close()


def open_shards(urls: Sequence[str], write_index: bool) -> list[Shard]:
    """Return all shards, indexed many at a time."""
    # Threads, because indexing mostly waits for disks and servers. More of them for a server, because a scan is a
    # sequence of small requests.
    with ThreadPoolExecutor(64 if any("://" in url for url in urls) else 16) as pool:
        return [
            Shard(url, i) for url, i in zip(urls, pool.map(lambda u: load_index(u, write_index), urls), strict=True)
        ]


def _open_shards(config: ShardsConfig, key: str, write_index: bool) -> list[Shard]:
    if config.index is None:
        urls = find_shards(config.shards, dotted_key(key, "shards"))
        refuse_several_splits(config.shards, urls, dotted_key(key, "shards"))
        return open_shards(urls, write_index)
    return [Shard(s.url, s.samples, s.sha256) for s in read_merged_index(config.index, config.shards, key)]


def merge_indexes(file: Path, shards: Iterable[Storage]) -> None:
    """Write the indexes of shards, their sizes and recorded hashes to one file."""
    with ThreadPoolExecutor(64) as pool:
        own = [shard for shard in shards if isinstance(shard, Shard)]
        sizes = list(pool.map(lambda shard: get_file_size(shard.url), own))
    write_merged_index(
        file, [MergedShard(s.url, s.index, size, s.content_hash() or "") for s, size in zip(own, sizes, strict=True)]
    )


SOURCE = SourceKind(ShardsConfig, _open_shards)
