"""Webdataset tars read by position: an index of byte offsets per shard, and one read per sample.

A sample is a sequence of members that share a key (`000001.jpg`, `000001.txt`, `000001.json`). The index contains the
byte offset of every sample, so any sample of any shard is one read, and resuming replays nothing. The index is built
once by scanning headers and stored next to the shard (`NAME.tar.idx.npy`, from `sparo data index`) or in the user's
cache.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from ...core.config import field, resumable_field
from ...core.errors import BadSampleError, DataError
from ...core.files import cache_folder, read_text, write_whole
from .remote import RemoteFile, filesystem_of, find_shards, with_retries
from .sources import SourceConfig, SourceKind, Storage
from .tar import ShardIndex, scan, unpack


class ShardsConfig(SourceConfig):
    """Webdataset tars, by a path or an fsspec URL (`cc3m/{00000..00331}.tar`, `s3://bucket/{000..999}.tar`)."""

    kind: Literal["shards"] = field("shards", "Entry of sparo.sources.")
    shards: str | tuple[str, ...] = resumable_field(..., "Folder, glob, brace range, fsspec URL, or a list of these.")


_OPEN_SHARDS = 64
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_LAYOUT, _HEADER_LENGTH = -2, 7  # layout of index files; the first one began with a size, which is never negative


def load_index(url: str, write_index: bool = False) -> ShardIndex:
    """Return the index of a shard: stored next to it (if not older than the shard), from the cache, or from a new scan.

    Args:
        url: the shard.
        write_index: scan in any case, and store the index next to the shard.

    Raises:
        DataError: the shard cannot be opened, or is compressed. A file that is not a tar has no samples and is not
            intact.
    """
    filesystem, path = filesystem_of(url)
    info = with_retries(url, lambda: filesystem.info(path))
    if info["size"] is None:
        raise DataError(
            f"{url}: the server does not report the size of this file, which random access needs. Copy the file to a disk."
        )
    # A web server reports no modification time, but an ETag.
    size, stamp = info["size"], str(info.get("mtime", info.get("ETag", "")))
    local = isinstance(filesystem, LocalFileSystem)
    if local and not stat.S_ISREG(info["mode"]):
        raise DataError(f"{url}: is not a regular file. Pipes and devices do not support random access.")
    cached = _cache_file(url, size, stamp)
    sidecar = Path(path + ".idx.npy") if local else cached
    fresh = sidecar.exists() and (not local or sidecar.stat().st_mtime >= info["mtime"])
    # An index that is requested is written again, because the old one may be wrong.
    for candidate in [] if write_index else ([sidecar] if fresh else []) + [cached]:
        if candidate.exists() and (index := _read_index(candidate, size)) is not None:
            break
    else:
        with with_retries(url, lambda: Path(path).open("rb") if local else RemoteFile(url, size)) as stream:
            index = with_retries(url, lambda: scan(stream, size))  # type: ignore[arg-type]
        try:
            _write_index(sidecar if write_index else cached, index, size)
        except OSError as error:  # without a writable cache, each start scans again
            if write_index:
                raise DataError(
                    f"{sidecar}: cannot be written ({error}). Index the shard where you have write access, or let training index it."
                ) from None
    if not len(index) and not index.intact:
        _refuse_compressed(url, size)
    return index


def _refuse_compressed(url: str, size: int) -> None:
    """Raise `DataError` for a compressed file, in which a tar cannot be read by position."""
    with with_retries(url, lambda: _open_stream(url, size)) as stream:
        begin = with_retries(url, lambda: stream.read(6))
    for magic, (name, tool) in _COMPRESSED.items():
        if begin.startswith(magic):
            raise DataError(
                f"{url}: is compressed with {name}, so it cannot be read by position as shards are. Unpack it, as in "
                f"{tool} < FILE > NEW.tar."
            )


def _open_stream(url: str, size: int) -> BinaryIO:
    """Open a shard's stream; that of a server retries failed reads."""
    filesystem, path = filesystem_of(url)
    local = isinstance(filesystem, LocalFileSystem)
    return io.FileIO(path) if local else RemoteFile(url, size)  # type: ignore[return-value]


class ShardReader:
    """Random access to the samples of many shards.

    Local files are read with `pread` through a small set of handles, other file systems through fsspec, which caches
    blocks.
    """

    def __init__(self) -> None:
        self._handles: OrderedDict[str, BinaryIO] = OrderedDict()
        self._indexes: OrderedDict[str, ShardIndex] = OrderedDict()

    def read(self, url: str, ordinal: int) -> tuple[str, dict[str, bytes]]:
        """Return the key and members of a sample.

        Raises:
            BadSampleError: these bytes are not the members of one sample.
            DataError: the shard cannot be read, or is shorter than its index says.
        """
        offsets = self.index(url).offsets
        start, end = int(offsets[ordinal]), int(offsets[ordinal + 1])
        stream = self._handle(url)
        if isinstance(stream, io.FileIO):
            data = with_retries(url, lambda: os.pread(stream.fileno(), end - start, start))
        else:
            stream.seek(start)
            data = stream.read(end - start)
        # The file was truncated or replaced by a shorter one after it was indexed, so later samples would be wrong,
        # too.
        if len(data) < end - start:
            raise DataError(
                f"{url}: is shorter than its index says, so the file changed after it was indexed. Remove its .idx.npy, then run the same command again."
            )
        try:
            return unpack(data)
        except ValueError:
            raise BadSampleError("damaged tar or stale index") from None

    def read_ahead(self, url: str, first: int, last: int) -> None:
        """Advise the kernel that samples first..last-1 of a local shard will be read soon."""
        stream = self._handle(url)
        if isinstance(stream, io.FileIO) and hasattr(os, "posix_fadvise"):
            offsets = self.index(url).offsets
            start = int(offsets[first])
            os.posix_fadvise(stream.fileno(), start, int(offsets[last]) - start, os.POSIX_FADV_WILLNEED)

    def index(self, url: str) -> ShardIndex:
        if url not in self._indexes:
            self._indexes[url] = load_index(url)
            while len(self._indexes) > 16 * _OPEN_SHARDS:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(url)
        return self._indexes[url]

    def _handle(self, url: str) -> BinaryIO:
        if url not in self._handles:
            offsets = self.index(url).offsets
            self._handles[url] = with_retries(url, lambda: _open_stream(url, int(offsets[-1]) if len(offsets) else 0))
            while len(self._handles) > _OPEN_SHARDS:
                # Thousands of shards and a limit of 1,024 open files: close the least recently used one, because
                # streams return to their shards.
                self._handles.popitem(last=False)[1].close()
        self._handles.move_to_end(url)
        return self._handles[url]

    def close(self) -> None:
        for stream in self._handles.values():
            stream.close()
        self._handles.clear()


def _cache_file(url: str, size: int, stamp: str) -> Path:
    absolute = url if "://" in url else str(Path(url).resolve())
    return (
        cache_folder()
        / "index"
        / (hashlib.sha256(os.fsencode(f"{absolute}\n{size}\n{stamp}")).hexdigest()[:32] + ".npy")
    )


def _read_index(path: Path, size: int) -> ShardIndex | None:
    """Return the index in a file: int64 [_LAYOUT, bytes of the shard, intact, the digest as four numbers, offsets …].

    None if it belongs to another file, has an older layout, or cannot be the result of a scan; it is then made again.
    """
    try:
        # More bytes than an index of that many samples needs: not an index, and it would fill memory.
        if path.stat().st_size > size + 4096:  # a sample takes two blocks in its shard and eight bytes here
            return None
        table = np.load(path, allow_pickle=False)
    except Exception:  # numpy evaluates a damaged header as a Python literal, which may raise anything
        return None
    if (
        table.ndim != 1
        or table.dtype != np.int64
        or len(table) < _HEADER_LENGTH
        or table[0] != _LAYOUT
        or table[1] != size
    ):
        return None
    offsets = table[_HEADER_LENGTH:]
    good = not len(offsets) or (offsets[0] >= 0 and offsets[-1] <= size and bool((np.diff(offsets) > 0).all()))
    return (
        ShardIndex(offsets, bool(table[2]), table[3:_HEADER_LENGTH].tobytes()) if good and len(offsets) != 1 else None
    )


def _write_index(path: Path, index: ShardIndex, size: int) -> None:
    digest = np.frombuffer(index.digest, dtype=np.int64)
    table = np.concatenate([np.asarray([_LAYOUT, size, index.intact], dtype=np.int64), digest, index.offsets])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # Write under a unique name, then rename, because several processes may scan the same shard at once.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            np.save(stream, table)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Shard(Storage):
    """A tar with its index."""

    def __init__(self, url: str, index: ShardIndex):
        self.url, self.index, self.intact = url, index, index.intact

    def __len__(self) -> int:
        return len(self.index)

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        return process_reader().read(self.url, number)

    def sampled_hash(self) -> str:
        return self.index.digest.hex()

    def content_hash(self) -> str | None:
        return recorded_hash(self.url)

    def read_ahead(self, first: int, last: int) -> None:
        process_reader().read_ahead(self.url, first, last)


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
    filesystem, path = filesystem_of(url)

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


def close_reader() -> None:
    """Close this process's open handles; later reads open them again."""
    if reader := _readers.pop(os.getpid(), None):
        reader.close()


def _open_shards(config: ShardsConfig, key: str, write_index: bool) -> list[Shard]:
    """Return all shards, indexed 16 at a time."""
    urls = find_shards(config.shards, f"{key}.shards")
    # Threads, because indexing mostly waits for disks and servers.
    with ThreadPoolExecutor(16) as pool:
        return [
            Shard(url, i) for url, i in zip(urls, pool.map(lambda u: load_index(u, write_index), urls), strict=True)
        ]


SOURCE = SourceKind(ShardsConfig, _open_shards)
