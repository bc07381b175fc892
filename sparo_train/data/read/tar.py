"""The tar format as far as shards need it: where samples begin, and the members of one.

tarfile reads a whole archive in order; here a sample is a slice of bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

BLOCK = 512
_EXTENDED = frozenset(b"xgLK")  # pax and GNU long-name headers describe the member after them


class ShardIndex(NamedTuple):
    """Byte offsets (n+1,) int64 of a shard's samples; `intact` is False where the tar breaks off or is none at all."""

    offsets: np.ndarray
    intact: bool

    def __len__(self) -> int:
        return max(0, len(self.offsets) - 1)


def scan(stream: IO[bytes], size: int) -> ShardIndex:
    """Walk the headers of a tar of `size` bytes and note where each sample begins."""
    offsets: list[int] = []
    key, at, intact, broken_inside = None, 0, True, False
    for member, start, end in _members(stream, size):
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
    """The members of one sample's bytes: its key and extension -> content.

    Raises:
        ValueError: these are not the whole members of one sample.
    """
    key, fields, at = "", {}, 0
    while at + BLOCK <= len(data):
        header = data[at : at + BLOCK]
        if header[156] in _EXTENDED:
            return _unpack_extended(data)
        size = _size(header)
        if at + BLOCK + size > len(data):
            raise ValueError("a member runs on behind the sample")
        if header[156] in b"0\0":
            key = _put(fields, key, _name(header), data[at + BLOCK : at + BLOCK + size])
        at += BLOCK + -(-size // BLOCK) * BLOCK
    return key, fields


def _put(fields: dict[str, bytes], key: str, member: str, content: bytes) -> str:
    """Add a member to the sample `key` (empty: not known yet); returns the key."""
    group = split_key(member)
    if group is None:
        return key
    if key and group[0] != key:
        raise ValueError("members of two samples")
    fields[group[1]] = content
    return group[0]


def _members(stream: IO[bytes], size: int) -> Iterator[tuple[str | None, int, int]]:
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
            described = _long_name(stream.read(length), header[156]) if header[156] in b"xL" else None
        except ValueError:
            yield None, at, at
            return
        end = at + BLOCK + -(-length // BLOCK) * BLOCK
        if end > size:
            yield None, at, at
            return
        if header[156] in _EXTENDED:
            long_name = described or long_name
        else:
            if header[156] in b"0\0":
                yield long_name or _name(header), start, end
            start, long_name = end, None
        at = end
    yield None, at, at


def _size(header: bytes) -> int:
    """Bytes of the member that a header announces. Raises `ValueError` where this is no header: its checksum differs."""
    field = header[148:156]
    rest = header[:148] + header[156:]
    unsigned = sum(rest) + 8 * ord(" ")
    if int(field.strip(b" \0"), 8) not in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest)):
        raise ValueError("not a tar header")
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
            content = tar.extractfile(member)
            if content is not None:
                key = _put(fields, key, member.name, content.read())
    return key, fields
