"""Index of a webdataset tar: the byte offset of every sample, so that one request reads any sample.

It is made once, by a scan, and stored next to the shard (`NAME.tar.idx.npy`, from `sparo data index`) or in
the user's cache.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from ...core.errors import DataError
from ...core.files import cache_folder
from ..servers.ranges import RemoteHeaders, read_range
from ..servers.remote import file_info, open_filesystem, version_stamp, with_retries
from .tar import ShardIndex, scan

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_MAX_PADDING = 20 * 512 + 1024  # zeros after the last member of a tar
_SUFFIX, _MAX_EXTRA_BYTES = (
    ".idx.npy",
    4096,
)  # an index, with 8 bytes per sample, is at most so much larger than its shard
_LAYOUT, _HEADER_LENGTH = -2, 7  # layout of index files; the first one began with a size, which is never negative


def load_index(url: str, write_index: bool = False) -> ShardIndex:
    """Return the index of a shard: stored next to it, from the cache, or from a new scan.

    An index next to a local shard is used if it is not older than the shard.

    Args:
        url: the shard.
        write_index: scan in any case, and store the index next to the shard; for a web server, in the cache.

    Raises:
        DataError: the shard cannot be opened, or is compressed. A file that is not a tar has no samples and is not
            intact.
    """
    filesystem, path = open_filesystem(url)
    info = file_info(url)
    size, stamp = info["size"], version_stamp(info)
    local = isinstance(filesystem, LocalFileSystem)
    if local and not stat.S_ISREG(info["mode"]):
        raise DataError(f"{url}: is not a regular file. Pipes and devices do not support random access.")
    cached, beside = _cache_file(url, size, stamp), f"{path}{_SUFFIX}"
    # With `write_index`, shards are scanned again, because a stored index may be wrong.
    stored = None if write_index else _stored_index(url, path, size, cached, info["mtime"] if local else None)
    index = _scan(url, path, size, local) if stored is None else stored
    if stored is None or not (local or cached.exists()):
        try:
            if write_index and not local and not url.startswith(("http://", "https://")):
                filesystem.pipe_file(beside, _index_bytes(index, size))
            else:
                _write_index(Path(beside) if write_index and local else cached, _index_bytes(index, size))
        except (
            Exception
        ) as error:  # without a writable cache, each start scans again; servers raise errors of their own
            if write_index:
                raise DataError(
                    f"{url}{_SUFFIX}: cannot be written ({error}). Index the shard where you have write access, or let training index it."
                ) from None
            if not isinstance(error, OSError):
                raise
    if not len(index) and not index.intact:
        _refuse_compressed(url, path, size, local)
    if local or not stamp:
        return index
    digest = hashlib.blake2b(stamp.encode(), digest_size=16).digest()
    return ShardIndex(index.offsets, index.intact, index.digest, digest)


def _stored_index(url: str, path: str, size: int, cached: Path, modified: float | None) -> ShardIndex | None:
    """Return the index next to a shard, or from the cache; None if there is none. `modified`: time of a local shard, None of a remote one."""
    beside = Path(f"{path}{_SUFFIX}")
    if modified is not None and beside.exists() and beside.stat().st_mtime >= modified:
        index = _read_index(beside, size)
        if index is not None:
            return index
    if cached.exists() and (index := _read_index(cached, size)) is not None:
        return index
    if modified is None:
        return _index_on_server(f"{url}{_SUFFIX}", size)
    energon = Path(f"{path}.idx")
    return _energon_index(energon, size) if energon.is_file() and energon.stat().st_mtime >= modified else None


def _energon_index(path: Path, size: int) -> ShardIndex | None:
    """Return the index that Megatron Energon wrote next to a local shard: uint64 offsets of the samples, and the end of the last one."""
    with suppress(OSError, ValueError):
        if path.stat().st_size <= size + _MAX_EXTRA_BYTES:
            offsets = np.frombuffer(path.read_bytes(), dtype="<u8").astype(np.int64)
            # An index of only some samples, written before others were appended, ends far before the file.
            whole = len(offsets) > 1 and size - _MAX_PADDING <= offsets[-1] <= size
            if whole and offsets[0] >= 0 and (np.diff(offsets) > 0).all():
                return ShardIndex(offsets, True)
    return None


def _index_on_server(url: str, size: int) -> ShardIndex | None:
    with suppress(Exception):  # a missing file is reported differently by each kind of server
        filesystem, path = open_filesystem(url)
        if filesystem.info(path)["size"] <= size + _MAX_EXTRA_BYTES:
            return _parse_index(io.BytesIO(filesystem.cat_file(path)), size)
    return None


def _scan(url: str, path: str, size: int, local: bool) -> ShardIndex:
    """Scan a shard. If it is remote, only headers are read, and the digest is empty."""
    if local:
        with with_retries(url, lambda: Path(path).open("rb")) as stream:
            return with_retries(url, lambda: scan(stream, size))
    return with_retries(url, lambda: scan(RemoteHeaders(url, size), size, content=False))  # type: ignore[arg-type]


def _refuse_compressed(url: str, path: str, size: int, local: bool) -> None:
    """Raise `DataError` for a compressed file, in which a tar cannot be read by position."""
    if local:
        with with_retries(url, lambda: Path(path).open("rb")) as stream:
            begin = with_retries(url, lambda: stream.read(6))
    else:
        begin = read_range(url, 0, min(6, size))
    for magic, (name, tool) in _COMPRESSED.items():
        if begin.startswith(magic):
            raise DataError(
                f"{url}: is compressed with {name}, so its samples cannot be read by position. Unpack it, as in "
                f"{tool} < FILE > NEW.tar."
            )


def _cache_file(url: str, size: int, stamp: str) -> Path:
    absolute = url if "://" in url else str(Path(url).resolve())
    return (
        cache_folder()
        / "index"
        / (hashlib.sha256(os.fsencode(f"{absolute}\n{size}\n{stamp}")).hexdigest()[:32] + ".npy")
    )


def _read_index(path: Path, size: int) -> ShardIndex | None:
    try:
        # A file this much larger than the shard is not an index, and could fill memory.
        return None if path.stat().st_size > size + _MAX_EXTRA_BYTES else _parse_index(path, size)
    except OSError:
        return None


def _parse_index(source: Path | io.BytesIO, size: int) -> ShardIndex | None:
    """Return the index in a file: int64 [_LAYOUT, bytes of the shard, intact, the digest as four numbers, offsets …].

    None for the index of another file, of an older layout, or one that no scan can give; the shard is then scanned.
    """
    try:
        table = np.load(source, allow_pickle=False)
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


def _index_bytes(index: ShardIndex, size: int) -> bytes:
    digest = np.frombuffer(index.digest, dtype=np.int64)
    out = io.BytesIO()
    np.save(out, np.concatenate([np.asarray([_LAYOUT, size, index.intact], dtype=np.int64), digest, index.offsets]))
    return out.getvalue()


def _write_index(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # Write under a unique name, then rename, because several processes may scan the same shard at once.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
