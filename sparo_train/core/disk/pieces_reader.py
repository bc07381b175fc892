"""Reader of tensors that are stored as pieces in several files, and an index of the file and the elements of each piece.

Without an index, a reader opens every file to learn its content. With 1,024 ranks, there are 2,048 files, and a rank
needs a few of them. Checkpoints of several ranks therefore contain an index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save
from torch import Tensor

from ..errors import CheckpointError
from .pieces import PARTIAL, DirectFile, Piece

INDEX = "index.safetensors"
Extent = tuple[int, int, tuple[int, ...]]  # of a piece: first element, number of elements, shape of the whole tensor


def collect_extents(pieces: Mapping[str, Piece]) -> dict[str, Extent]:
    """Return the extent of each piece by the name of its tensor."""
    return {name: (piece.begin, piece.data.numel(), tuple(piece.shape)) for name, piece in pieces.items()}


def write_index(path: Path, files: Mapping[str, tuple[str, Mapping[str, Extent]]]) -> tuple[int, str]:
    """Write the index of a checkpoint; returns its size in bytes and its SHA-256.

    For each part, it contains two tables (tensors, files) of int64: the first element of each piece, and the number of
    its elements, which is -1 if the file has no piece of the tensor.

    Args:
        path: path of the index.
        files: part and extents of every file, by the name of the file.

    Raises:
        OSError: the disk rejects a write.
    """
    tables: dict[str, np.ndarray] = {}
    described: dict[str, dict[str, Any]] = {}
    for part in dict.fromkeys(part for part, _ in files.values()):
        names = [name for name, (own, _) in files.items() if own == part]
        shapes = {tensor: list(shape) for name in names for tensor, (*_, shape) in files[name][1].items()}
        table = np.full((2, len(shapes), len(names)), -1, np.int64)
        rows = {tensor: row for row, tensor in enumerate(shapes)}
        for column, name in enumerate(names):
            extents = files[name][1]
            own_rows = [rows[tensor] for tensor in extents]
            table[:, own_rows, column] = (
                np.array([extent[:2] for extent in extents.values()], np.int64).reshape(-1, 2).T
            )
        tables[part] = table
        described[part] = {"files": names, "shapes": shapes}
    with DirectFile(path) as file:
        file.write(save(tables, {"parts": json.dumps(described)}))
    return file.size, file.sha256.hexdigest()


class _Pieces(NamedTuple):
    """Pieces of a tensor in the order of their elements."""

    shape: tuple[int, ...]
    begins: np.ndarray
    ends: np.ndarray
    files: list[Path]
    stored_name: str


class PiecesReader:
    """Reader of tensors from the files of a part, however they are sharded.

    Args:
        files: paths by part.
        rename: maps a name in the files to the name under which the tensor is read.
        index: written by `write_index`; None: all files are opened now.

    Raises:
        CheckpointError: a file is not readable, or the files together do not contain all of a tensor.
    """

    def __init__(
        self, files: Mapping[str, Sequence[Path]], rename: Callable[[str], str] = str, index: Path | None = None
    ):
        self._open: dict[Path, Any] = {}
        found = (
            {part: self._scan(paths) for part, paths in files.items()} if index is None else _load_index(index, files)
        )
        self._pieces = {
            part: {rename(pieces.stored_name): _refuse_gaps(part, pieces) for pieces in tensors if pieces.files}
            for part, tensors in found.items()
        }

    def _scan(self, paths: Sequence[Path]) -> list[_Pieces]:
        """Return the pieces of all tensors by opening every file."""
        shapes: dict[str, tuple[int, ...]] = {}
        extents: dict[str, list[tuple[int, int, Path]]] = {}
        for path in paths:
            file = self._file(path)
            try:
                partial = json.loads((file.metadata() or {}).get(PARTIAL, "{}"))
                for name in file.keys():  # noqa: SIM118  a method, not a mapping
                    stored_shape = file.get_slice(name).get_shape()
                    begin, shape = partial.get(name, (0, stored_shape))
                    shapes[name] = tuple(shape)
                    extents.setdefault(name, []).append((begin, math.prod(stored_shape), path))
            except (SafetensorError, ValueError, TypeError) as error:
                raise _unreadable(path, error) from None
        columns = {name: list(zip(*own, strict=True)) for name, own in extents.items()}
        return [
            _sorted_pieces(name, shapes[name], np.array(begins), np.array(sizes), files)
            for name, (begins, sizes, files) in columns.items()
        ]

    def _file(self, path: Path) -> Any:
        """Return an open file of tensors, which stays open."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from None
        return self._open[path]

    def names(self, part: str) -> list[str]:
        """Return the names of the tensors of a part; empty if the checkpoint does not have the part."""
        return list(self._pieces.get(part, {}))

    def shape(self, part: str, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises CheckpointError if the part does not contain it."""
        return self._get_pieces(part, name).shape

    def _get_pieces(self, part: str, name: str) -> _Pieces:
        try:
            return self._pieces[part][name]
        except KeyError:
            raise CheckpointError(f"checkpoint: {part} has no tensor {name!r}") from None

    def read(self, part: str, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return elements `begin` to `end` (default: all) as a 1-d CPU tensor in the dtype of the file."""
        pieces = self._get_pieces(part, name)
        end = math.prod(pieces.shape) if end is None else end
        # Pieces do not overlap, so both their first and their last elements are in ascending order.
        first, last = np.searchsorted(pieces.ends, begin, "right"), np.searchsorted(pieces.begins, end, "left")
        chunks = [self._read_piece(pieces, number, begin, end) for number in range(first, last)]
        if not chunks:
            return self._read_file(pieces, 0, lambda file: file.get_tensor(pieces.stored_name)).flatten()[:0]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _read_file(self, pieces: _Pieces, number: int, read: Callable[[Any], Tensor]) -> Tensor:
        """Return what `read` returns for the file of a piece. Raises `CheckpointError` if the file does not contain it."""
        try:
            return read(self._file(pieces.files[number]))
        except SafetensorError as error:
            raise _unreadable(pieces.files[number], error) from None

    def _read_piece(self, pieces: _Pieces, number: int, begin: int, end: int) -> Tensor:
        own_begin, own_end = int(pieces.begins[number]), int(pieces.ends[number])
        begin, end = max(begin, own_begin), min(end, own_end)

        def rows(file: Any) -> Tensor:
            stored = file.get_slice(pieces.stored_name)
            shape = stored.get_shape()
            if math.prod(shape) != own_end - own_begin:
                raise SafetensorError(
                    f"{pieces.stored_name!r} should have {own_end - own_begin} elements, got the shape {shape}"
                )
            if not shape:
                return file.get_tensor(pieces.stored_name).reshape(1)
            row = math.prod(shape[1:])
            first, last = (begin - own_begin) // row, -(-(end - own_begin) // row)
            offset = own_begin + first * row
            return stored[first:last].flatten()[begin - offset : end - offset]

        return self._read_file(pieces, number, rows)

    def part(self, part: str) -> dict[str, Tensor]:
        """Return all tensors of a part, whole."""
        return {name: self.read(part, name).reshape(self.shape(part, name)) for name in self.names(part)}


def _load_index(path: Path, files: Mapping[str, Sequence[Path]]) -> dict[str, list[_Pieces]]:
    """Return the pieces of all tensors from an index of the same files."""
    out: dict[str, list[_Pieces]] = {}
    try:
        tables = load_file(path)
        with safe_open(path, framework="np") as file:
            described = json.loads(file.metadata()["parts"])
        for part, paths in files.items():
            names, shapes = described[part]["files"], described[part]["shapes"]
            if sorted(names) != sorted(p.name for p in paths):
                raise ValueError(f"the files that the index lists for {part} differ from those of the checkpoint")
            begins, sizes = tables[part]
            if begins.shape != (len(shapes), len(names)):
                raise ValueError(
                    f"the index table of {part} should have the shape {(len(shapes), len(names))}, got {begins.shape}"
                )
            by_column = [path.parent / name for name in names]
            out[part] = [
                _sorted_pieces(name, shape, begins[row], sizes[row], by_column)
                for row, (name, shape) in enumerate(shapes.items())
            ]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from None
    return out


def _sorted_pieces(
    name: str, shape: Sequence[int], begins: np.ndarray, sizes: np.ndarray, files: Sequence[Path]
) -> _Pieces:
    """Return pieces in the order of their elements. Empty pieces are omitted, except for one if all are empty."""
    kept = np.flatnonzero(sizes > 0)
    if not len(kept):
        kept = np.flatnonzero(sizes == 0)[:1]
    order = kept[np.argsort(begins[kept], kind="stable")]
    return _Pieces(tuple(shape), begins[order], begins[order] + sizes[order], [files[i] for i in order], name)


def _refuse_gaps(part: str, pieces: _Pieces) -> _Pieces:
    """Return the pieces. Raises `CheckpointError` unless they contain every element once."""
    reached = np.concatenate(([0], pieces.ends))
    gaps = np.flatnonzero(pieces.begins != reached[:-1])
    at = int(reached[gaps[0]] if len(gaps) else reached[-1])
    if at != (whole := math.prod(pieces.shape)):
        raise CheckpointError(
            f"{pieces.files[0].parent}: {part} {pieces.stored_name!r} is incomplete: its files have a gap after the first {at} of "
            f"{whole} elements. The checkpoint is damaged. Remove it."
        )
    return pieces


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: not readable ({error}). Remove {path.parent} to resume from the checkpoint before it."
    )
