"""Tensors in pieces: runs of elements in row-major order, so that any rank can write or read any part of any tensor.

FSDP2's shards are runs of rows, ZeRO's are runs of elements, a replica's are whole tensors. A checkpoint says of each
tensor which files hold which runs, and a reader asks for the run that it needs; so what wrote it does not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from .direct_io import DirectFile

_HEADER = "pieces"  # where a file's header says what is not a whole tensor: {name: [begin, shape]}


class Piece(NamedTuple):
    """`data`: elements `begin` … of a tensor of `shape`, in row-major order; whole tensors and whole rows keep their shape."""

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
    """Where an engine reads its state from."""

    def names(self, part: str) -> Sequence[str]: ...
    def shape(self, part: str, name: str) -> tuple[int, ...]: ...
    def read(self, part: str, name: str, begin: int = 0, end: int | None = None) -> Tensor: ...


def assign_writers(sizes: Iterable[int], ranks: int) -> list[int]:
    """Which rank writes each of the tensors that all of them hold: the largest first, each to who has least."""
    sizes = list(sizes)
    loads, writers = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[number]
        writers[number] = owner
    return writers


# By alignment, the widest first, as the safetensors library orders them: its file and ours are the same bytes.
_TYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> tuple[int, str]:
    """One safetensors file, complete and on disk; returns its bytes and their SHA-256.

    The tensors are written from where they lie: the library's `save_file` copies each of them first.

    Raises:
        OSError: the disk does not take it.
    """
    order = list(_TYPES)
    named = sorted(pieces, key=lambda name: (order.index(pieces[name].data.dtype), name))
    partial = {name: [piece.begin, list(piece.shape)] for name, piece in pieces.items() if not piece.is_whole}
    header: dict[str, Any] = {"__metadata__": {_HEADER: json.dumps(partial)}} if partial else {}
    at = 0
    for name in named:
        data = pieces[name].data
        header[name] = {"dtype": _TYPES[data.dtype], "shape": list(data.shape), "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with DirectFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in named:
            flat = pieces[name].data.detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
    return file.size, file.sha256.hexdigest()


class _Run(NamedTuple):
    begin: int
    end: int
    file: Path


class PiecesReader:
    """Reads tensors from the files of a part, whatever pieces they hold.

    Args:
        files: paths by part.

    Raises:
        CheckpointError: a file is not readable, or the files together do not hold a tensor completely.
    """

    def __init__(self, files: Mapping[str, Sequence[Path]]):
        self._open: dict[Path, Any] = {}
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._runs: dict[str, dict[str, list[_Run]]] = {}
        for part, paths in files.items():
            self._shapes[part], self._runs[part] = {}, {}
            for path in paths:
                self._index_file(part, path)
            for name, runs in self._runs[part].items():
                self._refuse_gaps(part, name, runs)

    def _index_file(self, part: str, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            partial = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            for name in file.keys():  # noqa: SIM118  a method, not a mapping
                stored_shape = file.get_slice(name).get_shape()
                begin, shape = partial.get(name, (0, stored_shape))
                self._shapes[part][name] = tuple(shape)
                self._runs[part].setdefault(name, []).append(_Run(begin, begin + math.prod(stored_shape), path))
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path}: not readable ({error}); remove {path.parent} to continue from the one before"
            ) from None
        self._open[path] = file

    def _refuse_gaps(self, part: str, name: str, runs: list[_Run]) -> None:
        runs.sort()
        at = 0
        for run in runs:
            if run.begin != at and run.end > run.begin:
                break
            at = max(at, run.end)
        if at != math.prod(self._shapes[part][name]):
            raise CheckpointError(
                f"{runs[0].file.parent}: {part} {name!r} is not whole (its files hold {at} of "
                f"{math.prod(self._shapes[part][name])} elements in order); the folder is damaged, remove it"
            )

    def names(self, part: str) -> list[str]:
        """Tensors of a part; none where the checkpoint does not have it."""
        return list(self._runs.get(part, {}))

    def shape(self, part: str, name: str) -> tuple[int, ...]:
        """The whole tensor's shape. Raises CheckpointError where the part does not hold it."""
        try:
            return self._shapes[part][name]
        except KeyError:
            raise CheckpointError(f"checkpoint: {part} holds no {name!r}") from None

    def read(self, part: str, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Elements `begin` … `end` (default: all) as a 1-d CPU tensor in the dtype of the file."""
        whole = math.prod(self.shape(part, name))
        end = whole if end is None else end
        slices = [self._read_run(name, run, max(begin, run.begin), min(end, run.end)) for run in self._runs[part][name]]
        chunks = [piece for piece in slices if piece is not None]
        if not chunks:
            return self._open[self._runs[part][name][0].file].get_tensor(name).flatten()[:0]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _read_run(self, name: str, run: _Run, begin: int, end: int) -> Tensor | None:
        if begin >= end:
            return None
        tensor_slice = self._open[run.file].get_slice(name)
        shape = tensor_slice.get_shape()
        if not shape:
            return self._open[run.file].get_tensor(name).reshape(1)
        row = math.prod(shape[1:])
        first, last = (begin - run.begin) // row, -(-(end - run.begin) // row)
        offset = run.begin + first * row
        return tensor_slice[first:last].flatten()[begin - offset : end - offset]

    def part(self, part: str) -> dict[str, Tensor]:
        """All tensors of a part, whole."""
        return {name: self.read(part, name).reshape(self.shape(part, name)) for name in self.names(part)}
