"""Cache of remote samples on a node's disk (`data.cache`), shared by all processes of the node.

A remote file has a folder with `data`, a sparse file of its size, and `marks`, a checksum of 8 bytes for each sample. A
sample's bytes are written first, then its mark. Readers compare both, so a process that is killed, a power failure or a
damaged disk leaves nothing worse than a sample that is requested again, and no lock is needed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock

from ...core.config import Frozen, field
from ...core.errors import ConfigError

logger = logging.getLogger(__name__)
_OPEN_FILES = 64  # of a process, two descriptors each
_UNUSED_SECONDS = 3600.0  # folders of other data that were not opened for so long may be removed
_COUNTER = 8  # bytes


class CacheConfig(Frozen):
    """Cache of samples that are read from servers."""

    path: str = field(
        ...,
        "Folder on a local disk of each node, such as $SLURM_TMPDIR/sparo. Several runs can share it.",
        examples=["/tmp/sparo"],
    )
    gb: float = field(..., "Largest size on the disk, in GB (10^9 bytes).", examples=[500], gt=0, le=1e9)


class SampleCache:
    """Samples on the local disk. Descriptors are used by position only, so forked processes may share them.

    Args:
        config: the recipe's `data.cache`.

    Raises:
        ConfigError: the folder cannot be written, or its path contains a variable that is not set.
    """

    def __init__(self, config: CacheConfig):
        place = os.path.expandvars(config.path)
        if "$" in place:
            raise ConfigError(
                f"data.cache.path: {config.path} contains an environment variable that is not set on this node. Set it, "
                "or write the path without variables."
            )
        self._root, self._limit = Path(place).expanduser(), int(config.gb * 1e9)
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._full = False
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._used = os.open(self._root / "used", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"data.cache.path: {self._root} cannot be written ({error}). Name a folder on a local disk."
            ) from None

    def reserve_space(self, files: Iterable[CachedFile]) -> None:
        """Remove files of other data sets, oldest first, until these files have space, and count the bytes in use."""
        own = {file.name: file.size for file in files}
        with FileLock(str(self._root / "lock")):
            folders = {path.name: path for path in self._root.iterdir() if path.is_dir()}
            sizes = {name: _size_on_disk(path) for name, path in folders.items()}
            wanted = min(self._limit, sum(own.values()))
            others = sorted((_last_use(folders[name]), name) for name in sizes.keys() - own.keys())
            kept = sum(size for name, size in sizes.items() if name not in own)
            for last_use, name in others:
                if kept + wanted <= self._limit or time.time() - last_use < _UNUSED_SECONDS:
                    break
                shutil.rmtree(folders[name], ignore_errors=True)
                kept -= sizes.pop(name)
            os.pwrite(self._used, sum(sizes.values()).to_bytes(_COUNTER, "little"), 0)

    def reserve(self, count: int) -> bool:
        """Add to the number of bytes that all processes of the node have stored; return False if they would exceed the limit."""
        if self._full:
            return False
        with FileLock(str(self._root / "lock")):
            used = int.from_bytes(os.pread(self._used, _COUNTER, 0), "little") + count
            self._full = used > self._limit
            if self._full:
                return False
            os.pwrite(self._used, used.to_bytes(_COUNTER, "little"), 0)
        return True

    def open(self, name: str) -> tuple[int, int] | None:
        """Return the descriptors of a file's `data` and `marks`; None if they cannot be opened."""
        if name not in self._files:
            folder = self._root / name
            try:
                folder.mkdir(exist_ok=True)
                data, marks = (os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o666) for file in ("data", "marks"))
            except OSError as error:
                self.stop(error)
                return None
            self._files[name] = data, marks
            while len(self._files) > _OPEN_FILES:
                for descriptor in self._files.popitem(last=False)[1]:
                    os.close(descriptor)
        self._files.move_to_end(name)
        return self._files[name]

    def touch(self, name: str) -> None:
        """Record that a file is in use."""
        with suppress(OSError):
            os.utime(self._root / name)

    def stop(self, error: OSError) -> None:
        """Store nothing more in this process, and say why."""
        if not self._full:
            logger.warning(
                f"data.cache: {self._root} cannot be written ({error}). This process caches nothing more, and reads "
                "samples that are not cached from the server."
            )
        self._full = True


class CachedFile:
    """A remote file in the cache.

    Args:
        cache: the node's cache.
        url: the file.
        version: bytes that differ for another version of the file, which then has another folder.
        size: in bytes.
    """

    def __init__(self, cache: SampleCache, url: str, version: bytes, size: int):
        self.name = hashlib.sha256(url.encode(errors="surrogateescape") + b"\n" + version).hexdigest()[:32]
        self.size, self._cache, self._touched = size, cache, -math.inf

    def get(self, number: int, start: int, end: int) -> bytes | None:
        """Return a sample, the bytes [`start`, `end`) of the file; None if it is absent or damaged."""
        if (opened := self._cache.open(self.name)) is None:
            return None
        mark = os.pread(opened[1], 8, 8 * number)
        if not any(mark):
            return None
        data = os.pread(opened[0], end - start, start)
        return data if len(data) == end - start and _mark(data) == mark else None

    def missing_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges of samples in first..last-1 that are absent."""
        if (opened := self._cache.open(self.name)) is None:
            return [(first, last)]
        if time.monotonic() - self._touched > _UNUSED_SECONDS / 4:
            self._cache.touch(self.name)
            self._touched = time.monotonic()
        marks = os.pread(opened[1], 8 * (last - first), 8 * first).ljust(8 * (last - first), b"\0")
        absent = np.frombuffer(marks, dtype="<u8") == 0
        edges = np.flatnonzero(np.diff(np.concatenate([[False], absent, [False]]))) + first
        return list(pairwise(edges.tolist()))[::2]

    def put(self, number: int, start: int, data: bytes) -> None:
        """Store a sample, which begins at byte `start` of the file, unless the limit is reached. Errors of the disk end the storing, but not the run."""
        try:
            if self._cache.reserve(len(data)) and (opened := self._cache.open(self.name)) is not None:
                os.pwrite(opened[0], data, start)
                os.pwrite(opened[1], _mark(data), 8 * number)
        except OSError as error:
            self._cache.stop(error)


def _mark(data: bytes) -> bytes:
    return (xxhash.xxh3_64_intdigest(data) or 1).to_bytes(8, "little")


def _size_on_disk(folder: Path) -> int:
    size = 0
    for name in ("data", "marks"):
        with suppress(OSError):  # removed by another process
            size += (folder / name).stat().st_blocks * 512
    return size


def _last_use(folder: Path) -> float:
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
