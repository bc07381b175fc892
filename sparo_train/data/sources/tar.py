"""The tar format as needed for shards: offsets of samples, and the members of a sample. The standard library parses headers.

Foreign tars are damaged or hostile. This module adds the checks that tarfile lacks: every header advances by at least a
block, nothing that a header announces is read beyond the file or beyond a sane length, and any other error counts as
damage.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from ...core.errors import BadSampleError

BLOCK = 512
_SMALL, _SAMPLE = (
    4096,
    64,
)  # bytes: limits for members that are read whole, and for the piece that is read of larger ones
_MAX_EXTENDED_BYTES = 1 << 20  # limit in bytes for a long name or pax header; real ones have some hundred
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_OCTAL = re.compile(rb"([0-7]+)[\0 ]*")
# Errors of tarfile for invalid headers; nested extended headers cause a recursion error, a size of `inf` an overflow.
DAMAGE = (tarfile.TarError, ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, EOFError)


class ShardIndex(NamedTuple):
    """Byte offsets (n+1,) int64 of a shard's samples; `intact` is False if the tar is truncated or not a tar.

    `digest`: 32 bytes over all names and sizes, and over the parts of members that were read (`_content_sample`); zeros
    if only headers were read. `stamp`: 16 bytes that differ for another version of a remote file; zeros if unknown.
    """

    offsets: np.ndarray
    intact: bool
    digest: bytes = bytes(32)
    stamp: bytes = bytes(16)

    def __len__(self) -> int:
        return max(0, len(self.offsets) - 1)


class _Header(tarfile.TarInfo):
    """A header with a valid size: tarfile accepts `-1` as a size, and would go back or read everything."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        # Hostile headers announce names of terabytes, which tarfile would read.
        if header.size < 0 or (header.type in _EXTENDED and header.size > _MAX_EXTENDED_BYTES):
            raise tarfile.InvalidHeaderError(f"a size of {header.size}")  # pyright: ignore[reportAttributeAccessIssue]
        return header


class _BoundedStream(io.RawIOBase):
    """`size` bytes of a stream; later bytes cannot be read."""

    def __init__(self, stream: IO[bytes], size: int):
        self._stream, self._size = stream, size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or not 0 <= offset <= self._size:
            raise tarfile.ReadError(f"a member starts at byte {offset}, but the file has {self._size} bytes")
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise tarfile.ReadError("a member of no size")
        return self._stream.read(min(size, self._size - self._stream.tell()))


def _members(stream: IO[bytes], size: int) -> Iterator[tuple[tarfile.TarInfo | None, int]]:
    """Yield every member and the offset after it; finally (None, end of the headers).

    Raises:
        DAMAGE: invalid headers.
    """
    with tarfile.TarFile(fileobj=_BoundedStream(stream, size), tarinfo=_Header, errors="surrogateescape") as tar:
        end = 0
        while (member := tar.next()) is not None:
            tar.members = []  # tarfile would keep them all  # pyright: ignore[reportAttributeAccessIssue]
            # A header that leads back would be an endless loop.
            if tar.offset <= end:
                raise tarfile.ReadError(
                    f"the header at byte {member.offset} names an earlier byte, {tar.offset}, as its end"
                )
            end = tar.offset
            yield member, end
    yield None, end


def scan(stream: IO[bytes], size: int, content: bool = True) -> ShardIndex:
    """Scan the headers of a tar of `size` bytes and return the offset of each sample; never raises for invalid content.

    Args:
        stream: the tar.
        size: its size in bytes.
        content: also read parts of the members for the digest; False: read headers only, without a digest.
    """
    offsets: list[int] = []
    key, at, intact, broken_at, hasher = None, 0, False, 0, hashlib.sha256()
    try:
        for member, end in _members(stream, size):
            if member is None:
                stream.seek(end)
                mark = stream.read(BLOCK)  # tarfile treats an invalid header as the end, too
                intact, broken_at = len(mark) == BLOCK and not mark.strip(b"\0"), end
                break
            if end > size:
                broken_at = member.offset
                break
            broken_at = end
            group = split_key(member.name) if member.isreg() else None
            if group is None:
                continue
            if group[0] != key:
                # A key that appears again later is another sample, because the plan reads contiguous members.
                key = group[0]
                offsets.append(member.offset)
            at = end
            if content:
                names = f"{member.name} {member.size}\n".encode(errors="surrogateescape")
                hasher.update(names + _content_sample(stream, member))
    except DAMAGE:
        intact = False
    if not intact and broken_at < size and offsets:
        at = offsets.pop()  # the sample in which the file is truncated is incomplete
    return ShardIndex(
        np.asarray([*offsets, at] if offsets else [], dtype=np.int64), intact, hasher.digest() if content else bytes(32)
    )


def _content_sample(stream: IO[bytes], member: tarfile.TarInfo) -> bytes:
    """Return a small member (captions, labels), or the middle of a large one."""
    # The middle, because images of one camera begin alike.
    if member.size > _SMALL:
        stream.seek(member.offset_data + member.size // 2)
        return stream.read(_SAMPLE)
    stream.seek(member.offset_data)
    return stream.read(member.size)


def split_key(member: str) -> tuple[str, str] | None:
    """Return (key, extension in lower case) split as in webdataset, at the first dot of the file's name; None for other members."""
    # At the first dot, as in webdataset: `000001.left.jpg` has the extension `left.jpg`.
    folder, slash, base = member.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not stem or base.startswith("__"):
        return None
    return folder + slash + stem, extension.lower()


def unpack(data: bytes) -> tuple[str, dict[str, bytes]]:
    """Return key and members (extension -> content) of one sample's bytes, without links and sparse members.

    Raises:
        ValueError: the bytes are not the whole members of one sample.
        BadSampleError: two members have one extension, as `a.jpg` and `a.JPG`.
    """
    # A fast path, because an episode has a hundred members and tarfile is slow; anything unusual is left to tarfile.
    return _unpack_plain(data) or unpack_any(data)


def _unpack_plain(data: bytes) -> tuple[str, dict[str, bytes]] | None:
    """Unpack plain files with short names and one key; None if the bytes contain anything else."""
    at, key, fields = 0, "", dict[str, bytes]()
    while at < len(data):
        head = data[at : at + BLOCK]
        size, checksum = _OCTAL.fullmatch(head[124:136]), _OCTAL.fullmatch(head[148:156])
        name, _, rest = head[:100].partition(b"\0")
        if (
            size is None
            or checksum is None
            or head[156:157] not in (b"\0", b"0")
            # Leave everything but the plainest form to tarfile, which supports all of them.
            or head[257:262] != b"ustar"
            or any(head[345:500])
            or any(rest)
        ):
            return None
        group = split_key(name.decode(errors="surrogateescape"))
        # The checksum covers all bytes, with its own field as spaces.
        summed = sum(head) - sum(head[148:156]) + 8 * 32
        length = int(size[1], 8)
        if len(head) < BLOCK or summed != int(checksum[1], 8) or group is None or name.endswith(b"/"):
            return None
        begin = at + BLOCK
        at = begin + -(-length // BLOCK) * BLOCK
        if at > len(data) or group[1] in fields or (key and group[0] != key):
            return None
        key, fields[group[1]] = group[0], data[begin : begin + length]
    return (key, fields) if fields else None


def unpack_any(data: bytes) -> tuple[str, dict[str, bytes]]:
    """Unpack any kind of tar members with the standard library. Raises like `unpack`."""
    key, fields = "", dict[str, bytes]()
    try:
        for member, _ in _members(io.BytesIO(data), len(data)):
            group = split_key(member.name) if member is not None and member.isreg() and not member.issparse() else None
            if member is None or group is None:
                continue
            if key and group[0] != key:
                raise ValueError("the tar members belong to two samples")
            if group[1] in fields:
                raise BadSampleError(
                    "two members of a sample have the same extension", detail=f"got {member.name!r} again"
                )
            key, end = group[0], member.offset_data + member.size
            if end > len(data):
                raise ValueError("a tar member extends beyond the end of its sample")
            fields[group[1]] = data[member.offset_data : end]
    except DAMAGE as damage:
        raise ValueError(str(damage)) from None
    return key, fields
