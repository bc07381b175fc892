"""The tar format as far as shards need it: where samples begin, and the members of one. The standard library reads the headers.

Others' tars are hostile as often as they are damaged. What tarfile leaves open is closed here: every header moves on by at least a
block, nothing that a header announces is read beyond the file or beyond a sane length, and whatever else it stumbles over is damage.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

BLOCK = 512
_SMALL, _SAMPLE = 4096, 64  # bytes: of a member that is looked at whole, and of what is looked at in others
_MAX_EXTENDED_BYTES = 1 << 20  # bytes of a long name or a pax header; real ones have some hundred
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_OCTAL = re.compile(rb"([0-7]+)[\0 ]*")
# What tarfile raises on headers that are none; a nest of extended headers is a recursion, a size of `inf` an overflow.
DAMAGE = (tarfile.TarError, ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, EOFError)


class ShardIndex(NamedTuple):
    """Byte offsets (n+1,) int64 of a shard's samples; `intact` is False where the tar breaks off or is none at all.

    `digest`: 32 bytes over all names and sizes, and over what was read of the members (`_content_sample`).
    """

    offsets: np.ndarray
    intact: bool
    digest: bytes = bytes(32)

    def __len__(self) -> int:
        return max(0, len(self.offsets) - 1)


class _Header(tarfile.TarInfo):
    """A header whose size is a size: tarfile takes `-1` for a number, and would go back, or read all there is."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        # Hostile headers announce terabytes of name; tarfile would ask for them.
        if header.size < 0 or (header.type in _EXTENDED and header.size > _MAX_EXTENDED_BYTES):
            raise tarfile.InvalidHeaderError(f"a size of {header.size}")  # pyright: ignore[reportAttributeAccessIssue]
        return header


class _BoundedStream(io.RawIOBase):
    """`size` bytes of a stream; what lies behind them cannot be asked for."""

    def __init__(self, stream: IO[bytes], size: int):
        self._stream, self._size = stream, size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or not 0 <= offset <= self._size:
            raise tarfile.ReadError(f"a member at byte {offset} of {self._size}")
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise tarfile.ReadError("a member of no size")
        return self._stream.read(min(size, self._size - self._stream.tell()))


def _members(stream: IO[bytes], size: int) -> Iterator[tuple[tarfile.TarInfo | None, int]]:
    """Every member and the byte behind it; last (None, where the headers end).

    Raises:
        DAMAGE: these are no headers.
    """
    with tarfile.TarFile(fileobj=_BoundedStream(stream, size), tarinfo=_Header, errors="surrogateescape") as tar:
        end = 0
        while (member := tar.next()) is not None:
            tar.members = []  # tarfile would keep them all  # pyright: ignore[reportAttributeAccessIssue]
            # What leads back would be walked for ever.
            if tar.offset <= end:
                raise tarfile.ReadError(f"a header at byte {member.offset} leads back to {tar.offset}")
            end = tar.offset
            yield member, end
    yield None, end


def scan(stream: IO[bytes], size: int) -> ShardIndex:
    """Walk the headers of a tar of `size` bytes and note where each sample begins; never raises for what it finds there."""
    offsets: list[int] = []
    key, at, intact, broken_at, hasher = None, 0, False, 0, hashlib.sha256()
    try:
        for member, end in _members(stream, size):
            if member is None:
                stream.seek(end)
                mark = stream.read(BLOCK)  # tarfile takes a header that is none for the end, too
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
                # A key that comes again later is another sample: the plan reads runs of members.
                key = group[0]
                offsets.append(member.offset)
            at = end
            hasher.update(
                f"{member.name} {member.size}\n".encode(errors="surrogateescape") + _content_sample(stream, member)
            )
    except DAMAGE:
        intact = False
    if not intact and broken_at < size and offsets:
        at = offsets.pop()  # the sample the file breaks off in is not whole
    return ShardIndex(np.asarray([*offsets, at] if offsets else [], dtype=np.int64), intact, hasher.digest())


def _content_sample(stream: IO[bytes], member: tarfile.TarInfo) -> bytes:
    """A small member whole (captions, labels); of a large one its middle, which no two pictures have alike."""
    # The middle: the beginnings of pictures of one camera are alike.
    if member.size > _SMALL:
        stream.seek(member.offset_data + member.size // 2)
        return stream.read(_SAMPLE)
    stream.seek(member.offset_data)
    return stream.read(member.size)


def split_key(member: str) -> tuple[str, str] | None:
    """(key, extension in lower case) as webdataset splits them: at the first dot of the file's name; None for others."""
    # At the first dot, as webdataset: `000001.left.jpg` has the extension `left.jpg`.
    folder, slash, base = member.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not stem or base.startswith("__"):
        return None
    return folder + slash + stem, extension.lower()


def unpack(data: bytes) -> tuple[str, dict[str, bytes]]:
    """The members of one sample's bytes: its key and extension -> content. Links and sparse members are no content.

    Raises:
        ValueError: these are not the whole members of one sample.
    """
    # An episode has a hundred members, and tarfile takes its time with each; whatever is not plain is left to it.
    return _unpack_plain(data) or unpack_any(data)


def _unpack_plain(data: bytes) -> tuple[str, dict[str, bytes]] | None:
    """The same of plain files with short names, whole and of one key; None where anything is otherwise."""
    at, key, fields = 0, "", dict[str, bytes]()
    while at < len(data):
        head = data[at : at + BLOCK]
        size, checksum = _OCTAL.fullmatch(head[124:136]), _OCTAL.fullmatch(head[148:156])
        name, _, rest = head[:100].partition(b"\0")
        if (
            size is None
            or checksum is None
            or head[156:157] not in (b"\0", b"0")
            # Anything but the plainest form is left to tarfile, which knows all of them.
            or head[257:262] != b"ustar"
            or any(head[345:500])
            or any(rest)
        ):
            return None
        group = split_key(name.decode(errors="surrogateescape"))
        # The sum is of all bytes, with spaces in its own place.
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
    """The same of whatever a tar may hold, by the standard library. Raises as `unpack` does."""
    key, fields = "", dict[str, bytes]()
    try:
        for member, _ in _members(io.BytesIO(data), len(data)):
            group = split_key(member.name) if member is not None and member.isreg() and not member.issparse() else None
            if member is None or group is None:
                continue
            if key and group[0] != key:
                raise ValueError("members of two samples")
            if group[1] in fields:
                raise ValueError(f"two members {group[1]!r}")
            key, end = group[0], member.offset_data + member.size
            if end > len(data):
                raise ValueError("a member runs on behind the sample")
            fields[group[1]] = data[member.offset_data : end]
    except DAMAGE as damage:
        raise ValueError(str(damage)) from None
    return key, fields
