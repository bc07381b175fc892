"""One file with the indexes of many shards (`sparo data index --merge`), which is mapped instead of read.

It is a safetensors file, so that all ranks and workers of a node share its pages: offsets of 400 million samples are 3
GB. A file on a server is downloaded once per node, to the user's cache. With it, a start asks for no shard at all.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import save_file

from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.files import cache_folder, whole_file
from ..servers.remote import expand_braces, open_filesystem, version_stamp, with_retries
from .tar import ShardIndex

_LAYOUT = "sparo merged index 1"
# Names and types of safetensors. `ends` and `name_ends` are the ends of each shard's offsets and name.
_TENSORS = {
    "offsets": "I64", "ends": "I64", "names": "U8", "name_ends": "I64", "sizes": "I64", "intact": "U8", "digests": "U8", "sha256": "U8",
}  # fmt: skip
_OPTIONAL = {"stamps": "U8"}  # of shards on servers; indexes of older versions have none
_MAX_HEADER_BYTES = 1 << 20
_PROBES = 16  # shards on a disk whose size is compared with the index


class MergedShard(NamedTuple):
    """A shard in a merged index. `size` in bytes; `sha256` is empty if none was recorded."""

    url: str
    samples: ShardIndex
    size: int
    sha256: str = ""


def write_merged_index(file: Path, shards: Sequence[MergedShard]) -> None:
    """Write the indexes of shards to one file. Names are relative to its folder if the shards are below it, otherwise absolute."""
    folder = _absolute(str(file.parent)).rstrip("/") + "/"
    names = [_absolute(s.url).removeprefix(folder).encode(errors="surrogateescape") for s in shards]
    offsets = [np.asarray(s.samples.offsets, dtype=np.int64) for s in shards]
    tensors = {
        "offsets": np.concatenate(offsets) if offsets else np.zeros(0, dtype=np.int64),
        "ends": np.cumsum([len(o) for o in offsets], dtype=np.int64),
        "names": np.frombuffer(b"".join(names), dtype=np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "sizes": np.array([s.size for s in shards], dtype=np.int64),
        "intact": np.array([s.samples.intact for s in shards], dtype=np.uint8),
        "digests": np.frombuffer(b"".join(s.samples.digest for s in shards), dtype=np.uint8),
        "sha256": np.frombuffer(b"".join(bytes.fromhex(s.sha256) or bytes(32) for s in shards), dtype=np.uint8),
        "stamps": np.frombuffer(b"".join(s.samples.stamp for s in shards), dtype=np.uint8),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            save_file(tensors, temporary, {"layout": _LAYOUT})
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error}). Name another file.") from None


def read_merged_index(place: str, patterns: str | Sequence[str], key: str) -> list[MergedShard]:
    """Return the shards of a merged index that match patterns, in the order of the patterns.

    Args:
        place: path or URL of the index.
        patterns: folders, globs, brace ranges or URLs, as in `shards`. They are compared with the names in the index.
        key: dotted key of the source, for errors.

    Raises:
        ConfigError: a pattern matches no shard of the index.
        DataError: the file cannot be read, is not a merged index, or a shard's size differs from it.
    """
    tensors = _map(_local_copy(place), place)
    ends, name_ends = tensors["ends"], tensors["name_ends"]
    names, stamps = tensors["names"].tobytes(), tensors.get("stamps", np.zeros(16 * len(ends), dtype=np.uint8))
    folder = place.rpartition("/")[0]
    shards: dict[str, MergedShard] = {}
    for i, (end, name_end) in enumerate(zip(ends.tolist(), name_ends.tolist(), strict=True)):
        begin, name_begin = (int(ends[i - 1]), int(name_ends[i - 1])) if i else (0, 0)
        name = os.fsdecode(names[name_begin:name_end])
        url = name if "://" in name or name.startswith("/") or not folder else f"{folder}/{name}"
        sha256 = tensors["sha256"][32 * i : 32 * i + 32]
        shards[url] = MergedShard(
            url,
            ShardIndex(
                tensors["offsets"][begin:end],
                bool(tensors["intact"][i]),
                tensors["digests"][32 * i : 32 * i + 32].tobytes(),
                stamps[16 * i : 16 * i + 16].tobytes(),
            ),
            int(tensors["sizes"][i]),
            sha256.tobytes().hex() if sha256.any() else "",
        )
    chosen = [shards[url] for url in _matching(list(shards), patterns, key, place)]
    _probe(chosen, place)
    return chosen


def _matching(urls: list[str], patterns: str | Sequence[str], key: str, place: str) -> list[str]:
    known, found = {_absolute(url): url for url in urls}, dict[str, None]()
    for part in (patterns,) if isinstance(patterns, str) else patterns:
        for name in expand_braces(part, key):
            wanted = _absolute(name)
            if wanted in known:
                hits = [wanted]
            elif any(c in name for c in "*?["):
                hits = fnmatch.filter(known, wanted)
            else:
                hits = [place for place in known if place.rpartition("/")[0] == wanted.rstrip("/")]
            if not hits:
                raise ConfigError(
                    f"{key}.shards: {name!r} is not in the index {place}; {did_you_mean(name, urls[:200])}"
                )
            found.update(dict.fromkeys(known[hit] for hit in hits))
    return list(found)


def _absolute(url: str) -> str:
    # Path.resolve would look at every shard on the disk.
    return url if "://" in url else os.path.abspath(url)  # noqa: PTH100


def _probe(shards: Sequence[MergedShard], place: str) -> None:
    """Raise `DataError` if one of some local shards has another size than in the index, which is out of date then."""
    for shard in shards[:: max(1, len(shards) // _PROBES)]:
        if "://" not in shard.url:
            size = with_retries(shard.url, lambda url=shard.url: Path(url).stat().st_size)
            if size != shard.size:
                raise DataError(
                    f"{place}: {shard.url} has {size} bytes, but {shard.size} according to the index. Write the index again: sparo data index … --merge {place}"
                )


def _local_copy(place: str) -> Path:
    """Return the file itself, or the copy of a file on a server, which one process of the node downloads."""
    filesystem, path = open_filesystem(place)
    if isinstance(filesystem, LocalFileSystem):
        return Path(path)
    info = with_retries(place, lambda: filesystem.info(path))
    version = f"{place}\n{info.get('size')}\n{version_stamp(info)}"
    copy = cache_folder() / "index" / f"{hashlib.sha256(version.encode()).hexdigest()[:32]}.safetensors"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{copy}.lock"):
            if not copy.exists():
                with whole_file(copy) as temporary:
                    with_retries(place, lambda: filesystem.get_file(path, str(temporary)))
    except OSError as error:
        raise DataError(
            f"{place}: cannot be copied to {copy.parent} ({error}). Set XDG_CACHE_HOME to a folder with space."
        ) from None
    return copy


def _map(file: Path, place: str) -> dict[str, np.ndarray]:
    """Map the tensors of a safetensors file. Raises `DataError` if it is not a merged index."""
    wrong = DataError(
        f"{place}: is not a merged index of this version. Write it with sparo data index … --merge {place}"
    )
    stream = with_retries(place, lambda: file.open("rb"))
    with stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise wrong
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    tensors: dict[str, np.ndarray] = {}
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        header = json.loads(content[8 : 8 + length])
        if header["__metadata__"]["layout"] == _LAYOUT:
            for name, kind in (_TENSORS | {k: v for k, v in _OPTIONAL.items() if k in header}).items():
                begin, end = header[name]["data_offsets"]
                if header[name]["dtype"] == kind and 0 <= begin <= end <= size - 8 - length:
                    dtype = np.dtype({"I64": "<i8", "U8": "u1"}[kind])
                    tensors[name] = np.frombuffer(content, dtype, (end - begin) // dtype.itemsize, 8 + length + begin)
    if not _is_complete(tensors):
        raise wrong
    return tensors


def _is_complete(t: dict[str, np.ndarray]) -> bool:
    """Return whether all tensors are there, and their lengths belong together."""
    if not _TENSORS.keys() <= t.keys():
        return False
    count = len(t["sizes"])
    ranges = all(
        len(ends) == count and (np.diff(ends, prepend=0) >= 0).all() and (int(ends[-1]) if count else 0) == total
        for ends, total in ((t["ends"], len(t["offsets"])), (t["name_ends"], len(t["names"])))
    )
    # Offsets are not read here, because they may be gigabytes; a reader refuses those that do not rise.
    return (
        ranges
        and [len(t["intact"]), len(t["digests"]), len(t["sha256"])] == [count, 32 * count, 32 * count]
        and (len(t.get("stamps", ())) in (0, 16 * count))
    )
