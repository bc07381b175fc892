"""Reading webdataset tars by position: an index of byte offsets per shard, and one read per sample.

A sample is a run of members that share a key (`000001.jpg`, `000001.txt`, `000001.json`). The index holds the byte
offset of every sample, so that any sample of any shard is one read, and resuming replays nothing. It is built by
scanning headers once, and kept beside the shard (`NAME.tar.idx.npy`, from `sparo data index`) or in the user's cache.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from ..core.errors import DataError

BLOCK = 512
_OPEN_SHARDS = 64
_EXTENDED = frozenset(b"xgLK")  # pax and GNU long-name headers describe the member after them


class ShardIndex(NamedTuple):
    """Byte offsets (n+1,) int64 of a shard's samples; `intact` is False where the tar ends in the middle of a member."""

    offsets: np.ndarray
    intact: bool

    def __len__(self) -> int:
        return max(0, len(self.offsets) - 1)


def open_url(url: str) -> BinaryIO:
    """Open a path or an fsspec URL for reading; raises `DataError` naming it."""
    try:
        return fsspec.open(url, "rb").open()  # type: ignore[return-value]
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: cannot be opened ({error})") from None


def load_index(url: str, write_beside: bool = False) -> ShardIndex:
    """The index of a shard: from beside it, from the cache, or by scanning it now (and then cached).

    Raises:
        DataError: the shard cannot be opened or is no tar file.
    """
    filesystem, path = fsspec.core.url_to_fs(url)
    try:
        info = filesystem.info(path)
    except OSError as error:
        raise DataError(f"{url}: cannot be read ({error})") from None
    size, stamp = info["size"], str(info.get("mtime", info.get("ETag", "")))
    local = isinstance(filesystem, LocalFileSystem)
    cached = _cache_file(url, size, stamp)
    target = Path(path + ".idx.npy") if write_beside and local else cached
    for candidate in ([Path(path + ".idx.npy")] if local else []) + [cached]:
        if candidate.exists() and (index := _read_index(candidate, size)) is not None:
            break
    else:
        with open_url(url) as stream:
            index = scan(stream, size, url)
    if write_beside or not target.exists():
        _write_index(target, index, size)
    return index


def scan(stream: BinaryIO, size: int, name: str) -> ShardIndex:
    """Walk a tar's headers and note where each sample begins."""
    offsets: list[int] = []
    key, at, intact, broken_inside = None, 0, True, False
    for member, start, end in _members(stream, size, name):
        if member is None:
            intact, broken_inside = False, start < size
            break
        group = split_key(member)
        if group is None:
            continue
        if group[0] != key:
            key = group[0]
            offsets.append(start)
        at = end
    if broken_inside and offsets:
        at = offsets.pop()  # the sample the file breaks off in is not whole
    return ShardIndex(np.asarray([*offsets, at] if offsets else [], dtype=np.int64), intact)


def split_key(member: str) -> tuple[str, str] | None:
    """(key, extension in lower case) as webdataset splits them: at the first dot of the file's name; None for others."""
    folder, slash, base = member.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not stem or base.startswith("__"):
        return None
    return folder + slash + stem, extension.lower()


def unpack(data: bytes) -> tuple[str, dict[str, bytes]]:
    """The members of one sample's bytes: its key and extension -> content."""
    key, fields, at = "", {}, 0
    while at + BLOCK <= len(data):
        header = data[at : at + BLOCK]
        if header[156] in _EXTENDED:
            return _unpack_extended(data)
        size = _size(header)
        group = split_key(_name(header))
        if group is not None and header[156] in b"0\0":
            key = group[0]
            fields[group[1]] = data[at + BLOCK : at + BLOCK + size]
        at += BLOCK + -(-size // BLOCK) * BLOCK
    return key, fields


class ShardReader:
    """Random access to the samples of many shards. Local files are read with `pread` through a small set of handles;
    other file systems through fsspec, which fetches and keeps blocks."""

    def __init__(self) -> None:
        self._handles: OrderedDict[str, BinaryIO] = OrderedDict()
        self._indexes: OrderedDict[str, ShardIndex] = OrderedDict()

    def read(self, url: str, ordinal: int) -> tuple[str, dict[str, bytes]]:
        """Key and fields of a sample. Raises `DataError` where the shard is shorter than its index says."""
        offsets = self.index(url).offsets
        start, end = int(offsets[ordinal]), int(offsets[ordinal + 1])
        stream = self._handle(url)
        if isinstance(stream, io.FileIO):
            data = os.pread(stream.fileno(), end - start, start)
        else:
            stream.seek(start)
            data = stream.read(end - start)
        if len(data) < end - start:
            raise DataError(f"{url}: shorter than its index; the file changed, remove its .idx.npy and start again")
        return unpack(data)

    def read_ahead(self, url: str, first: int, last: int) -> None:
        """Tell the system that samples first..last-1 of a local shard come soon."""
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
            filesystem, path = fsspec.core.url_to_fs(url)
            try:
                local = isinstance(filesystem, LocalFileSystem)
                self._handles[url] = io.FileIO(path) if local else filesystem.open(path, "rb")  # type: ignore[assignment]
            except OSError as error:
                raise DataError(f"{url}: cannot be opened ({error})") from None
            while len(self._handles) > _OPEN_SHARDS:
                self._handles.popitem(last=False)[1].close()
        self._handles.move_to_end(url)
        return self._handles[url]

    def close(self) -> None:
        for stream in self._handles.values():
            stream.close()
        self._handles.clear()


def _members(stream: BinaryIO, size: int, name: str) -> Iterator[tuple[str | None, int, int]]:
    """(name, first byte, byte after) of every regular member; (None, where, where) last if the end mark is missing."""
    at = 0
    start, long_name = 0, None
    while at + BLOCK <= size:
        stream.seek(at)
        header = stream.read(BLOCK)
        if not header.strip(b"\0"):
            return
        try:
            length = _size(header)
        except ValueError:
            if at == 0:
                raise DataError(f"{name}: not a tar file") from None
            yield None, at, at
            return
        end = at + BLOCK + -(-length // BLOCK) * BLOCK
        if end > size:
            yield None, at, at
            return
        if header[156] in _EXTENDED:
            if header[156] in b"xL":
                long_name = _long_name(stream.read(length), header[156])
        else:
            if header[156] in b"0\0":
                yield long_name or _name(header), start, end
            start, long_name = end, None
        at = end
    if at == 0 and size:
        raise DataError(f"{name}: not a tar file")
    yield None, at, at


def _size(header: bytes) -> int:
    if header[124] & 0x80:  # GNU's base-256 for members over 8 GiB
        return int.from_bytes(header[125:136], "big")
    return int(header[124:136].strip(b" \0") or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:262] == b"ustar" and header[262:264] != b"  " else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _long_name(payload: bytes, kind: int) -> str | None:
    if kind == ord("L"):
        return payload.rstrip(b"\0").decode("utf-8", "surrogateescape")
    while payload:
        length = int(payload.split(b" ", 1)[0])
        keyword, _, value = payload[: length - 1].split(b" ", 1)[1].partition(b"=")
        if keyword == b"path":
            return value.decode("utf-8", "surrogateescape")
        payload = payload[length:]
    return None


def _unpack_extended(data: bytes) -> tuple[str, dict[str, bytes]]:
    key, fields = "", {}
    with tarfile.open(fileobj=io.BytesIO(data + bytes(2 * BLOCK))) as tar:
        for member in tar:
            group = split_key(member.name)
            content = tar.extractfile(member)
            if group is not None and content is not None:
                key = group[0]
                fields[group[1]] = content.read()
    return key, fields


def _cache_file(url: str, size: int, stamp: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    absolute = url if "://" in url else str(Path(url).resolve())
    return (
        base / "sparo" / "index" / (hashlib.sha256(f"{absolute}\n{size}\n{stamp}".encode()).hexdigest()[:32] + ".npy")
    )


def _read_index(path: Path, size: int) -> ShardIndex | None:
    """An index file is int64: [bytes of the shard, intact, offsets …]; None where it belongs to another file."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        return None
    return ShardIndex(table[2:], bool(table[1])) if len(table) >= 2 and table[0] == size else None


def _write_index(path: Path, index: ShardIndex, size: int) -> None:
    table = np.concatenate([np.asarray([size, index.intact], dtype=np.int64), index.offsets])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            np.save(stream, table)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a read-only cache costs a scan per start, no more
