"""Sharded tensors: ranges of elements in row-major order, so that any rank can write or read any part of any tensor.

FSDP2 shards are ranges of rows, ZeRO shards are ranges of elements, replicas are whole tensors. A checkpoint records
which file holds which range of each tensor, and a reader asks for the range that it needs. The engine that wrote a
checkpoint therefore does not matter.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

_CHUNK = 8 << 20
_ALIGNED = 4096  # a multiple of every disk's sector size
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # error codes of disks and servers without direct I/O
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not on every system


# Files bypass the page cache and are hashed while they are written, because checkpoints are rarely read soon and
# training needs the CPU. Writing 94 MB through the page cache took 0.26 s of a core that also trains (on a virtual
# machine, where every new page faults on the host), and reading it back for the hash took 0.06 s. Direct writes avoid
# both.
class DirectFile:
    """Context manager for a new file that is complete and on disk when the context ends.

    Attributes:
        size: bytes written so far.
        sha256: their hash.

    Raises:
        OSError: the disk rejects a write.
    """

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:  # tmpfs, and some servers
            if error.errno not in _UNSUPPORTED:
                raise
            self._file = os.open(path, flags, 0o666)
        self._buffer, self._pending = mmap.mmap(-1, _CHUNK), 0  # anonymous memory is page-aligned
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append data; a memoryview is appended as flat bytes."""
        self.sha256.update(data)
        self.size += len(data)
        view = np.frombuffer(data, np.uint8)  # copies that release the GIL
        while len(view):
            take = min(len(view), _CHUNK - self._pending)
            self._bytes[self._pending : self._pending + take] = view[:take]
            self._pending, view = self._pending + take, view[take:]
            if self._pending == _CHUNK:
                self._flush(_CHUNK)

    def _flush(self, count: int) -> None:
        """Write the first `count` bytes of the buffer."""
        with memoryview(self._buffer) as view:
            done = 0
            while done < count:
                try:
                    done += os.write(self._file, view[done:count])
                except OSError as error:
                    if error.errno not in _UNSUPPORTED or not _DIRECT:
                        raise
                    self._disable_direct_io()  # opening worked but writing did not: a disk with larger sectors, or a server
        self._pending = 0

    def _disable_direct_io(self) -> None:
        import fcntl  # always available where O_DIRECT is

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        if not flags & _DIRECT:
            raise OSError(errno.EINVAL, "the file accepts no data")
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._pending:
                    self._flush(-(-self._pending // _ALIGNED) * _ALIGNED)  # whole sectors; the excess is cut off below
                os.ftruncate(self._file, self.size)
                os.fsync(self._file)
        finally:
            os.close(self._file)


PARTIAL = "pieces"  # key of the safetensors header that describes partial tensors: {name: [begin, shape]}


class Piece(NamedTuple):
    """Elements of a tensor of `shape` from `begin` on, in row-major order; whole tensors and whole rows keep their shape."""

    data: Tensor
    shape: tuple[int, ...]
    begin: int = 0

    @staticmethod
    def unsharded(tensor: Tensor) -> Piece:
        return Piece(tensor.detach(), tuple(tensor.shape))

    @property
    def is_whole(self) -> bool:
        return tuple(self.data.shape) == self.shape


Pieces = dict[str, dict[str, Piece]]  # part -> name -> what this rank writes


class CheckpointReader(Protocol):
    """Reader from which an engine loads its state."""

    def names(self, part: str) -> Sequence[str]: ...
    def shape(self, part: str, name: str) -> tuple[int, ...]: ...
    def read(self, part: str, name: str, begin: int = 0, end: int | None = None) -> Tensor: ...


def assign_writers(sizes: Iterable[int], ranks: int) -> list[int]:
    """Assign each replicated tensor to the rank that writes it: largest tensors first, each to the rank with the least to write."""
    sizes = list(sizes)
    loads, writers = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[number]
        writers[number] = owner
    return writers


# Sort by alignment, widest first, as the safetensors library does, so that its files and ours are the same bytes.
_TYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> tuple[int, str]:
    """Write one safetensors file to disk; returns its size in bytes and its SHA-256.

    Tensors are written from their own memory, whereas `save_file` of the library copies each of them first.

    Raises:
        OSError: the disk rejects a write.
    """
    order = list(_TYPES)
    named = sorted(pieces, key=lambda name: (order.index(pieces[name].data.dtype), name))
    partial = {name: [piece.begin, list(piece.shape)] for name, piece in pieces.items() if not piece.is_whole}
    header: dict[str, Any] = {"__metadata__": {PARTIAL: json.dumps(partial)}} if partial else {}
    at = 0
    for name in named:
        data = pieces[name].data
        header[name] = {"dtype": _TYPES[data.dtype], "shape": list(data.shape), "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight bytes
    with DirectFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in named:
            flat = pieces[name].data.detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
    return file.size, file.sha256.hexdigest()
