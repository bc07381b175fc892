"""Cache of frozen towers' tokens, looked up by the content of their image or caption, whatever shard it is in.

    FOLDER/KEY/manifest.json  PART.safetensors …

KEY is a hash of everything that determines the tokens (weights, sizes, pixels, precision), PART of a range of samples.
A part with n entries contains `rows` (all tokens, one entry after another), `starts` (n + 1), `digests` (n, 16) and
`sums` (n), the XXH3 of each entry's rows, which is verified at every read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...core.errors import DataError
from ...core.files import write_whole

_FORMAT = 1
_TYPES = {"fp16": np.float16, "fp32": np.float32}


def compute_digest(content: bytes) -> bytes:
    """Return sixteen bytes that identify an image file, or the ids of a caption."""
    return xxhash.xxh3_128_digest(content)


class TokenCache:
    """Tokens of one tower.

    Args:
        folder: cache of all towers of all runs.
        facts: everything that determines the tokens, as plain values.
        dtype: `fp16` for half the space, or `fp32`, the towers' own output.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key_fields: Mapping[str, Any], dtype: str):
        manifest = {"format": _FORMAT, "dtype": dtype, **key_fields}
        text = json.dumps(manifest, sort_keys=True)
        self.folder, self._type = folder / hashlib.sha256(text.encode()).hexdigest()[:32], _TYPES[dtype]
        self._write(self.folder / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())

    def has(self, part: str) -> bool:
        """Return whether a part exists with its full length and undamaged tables."""
        return self._tables(part) is not None

    def write(self, part: str, digests: Sequence[bytes], entries: Sequence[np.ndarray]) -> None:
        """Write the tokens (N, d) of a part's entries atomically.

        Raises:
            DataError: the folder cannot be written, or values are not finite in this dtype.
        """
        # Overflow is checked below, with an error that says what to do.
        with np.errstate(over="ignore"):
            rows = np.concatenate(entries).astype(self._type) if entries else np.zeros((0, 1), self._type)
        if not np.isfinite(rows).all():
            raise DataError(
                "objective.cache: tokens are not finite. If they are too large for 16 bits, set objective.cache.dtype=fp32."
            )
        starts = np.cumsum([0, *map(len, entries)])
        sums = [_sum(rows[a:b]) for a, b in pairwise(starts)]
        tensors = {
            "rows": rows,
            "starts": starts.astype(np.int64),
            "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
            "sums": np.array(sums, np.uint64).view(np.int64),
        }
        self._write(self._path(part), save(tensors, metadata={"seal": _seal(tensors, rows.dtype.name, rows.shape)}))

    def open(self, parts: Sequence[str]) -> None:
        """Look up entries in these parts from now on. Workers that are forked later share the index."""
        self._names, columns, self._begin = list(parts), [], []
        for number, part in enumerate(parts):
            tables = self._tables(part)
            if tables is None:
                raise DataError(f"{self._path(part)}: is damaged. Remove it, and it will be computed again.")
            starts, halves = tables["starts"], tables["digests"].copy().view(np.uint64)
            of = np.full(len(halves), number)
            columns.append((halves[:, 0], halves[:, 1], of, starts[:-1], starts[1:], tables["sums"]))
            self._begin.append(tables["begin"])
            if len(halves):
                self._width = tables["width"]
        joined = [np.concatenate(some) for some in zip(*columns, strict=True)]
        # Sorted by half of the digest for a binary search; equal halves are very rare.
        order = np.argsort(joined[0], kind="stable")
        self._high, self._low, self._part, self._start, self._end, self._sums = (some[order] for some in joined)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._high)

    def read(self, digest: bytes) -> np.ndarray | None:
        """Return the tokens (N, d) for a digest; None if there are none.

        Raises:
            DataError: the tokens are damaged.
        """
        high, low = np.frombuffer(digest, np.uint64)
        at = int(np.searchsorted(self._high, high))
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                return self._entry(at)
            at += 1
        return None

    def _entry(self, at: int) -> np.ndarray:
        number, first, last = int(self._part[at]), int(self._start[at]), int(self._end[at])
        path, row = self._path(self._names[number]), self._width * np.dtype(self._type).itemsize
        try:  # read instead of mapped, because truncating a mapped file would kill the process
            with path.open("rb", buffering=0) as file:
                # Read by position on its own handle, because forked workers share file positions.
                content = os.pread(file.fileno(), (last - first) * row, self._begin[number] + first * row)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error}). Run the same command again to recompute it.") from None
        rows = np.frombuffer(bytearray(content[: len(content) // row * row]), self._type).reshape(-1, self._width)
        if _sum(rows) != int(self._sums[at].view(np.uint64)):
            raise DataError(f"{path}: is damaged. Remove it, and it will be computed again.")
        return rows

    def _tables(self, part: str) -> dict[str, Any] | None:
        """Return a part's tables, the width of its rows and their offset in the file; None if the part is missing or damaged."""
        path = self._path(part)
        try:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            with safe_open(path, "np") as file:  # refuses a file whose length differs from its header
                tables: dict[str, Any] = {name: file.get_tensor(name) for name in ("starts", "digests", "sums")}
                rows, seal = file.get_slice("rows"), (file.metadata() or {}).get("seal")
                shape = tuple(rows.get_shape())
            dtype = {"F16": "float16", "F32": "float32"}.get(rows.get_dtype(), "")
            if dtype != np.dtype(self._type).name or seal != _seal(tables, dtype, shape):
                return None
            return {**tables, "width": shape[1], "begin": 8 + length + header["rows"]["data_offsets"][0]}
        except (OSError, ValueError, KeyError, TypeError, MemoryError, SafetensorError):
            return None

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as error:
            raise DataError(
                f"objective.cache: {path} cannot be written ({error}). Free space, or set another folder."
            ) from None


def _sum(rows: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).data)


def _seal(tables: Mapping[str, np.ndarray], dtype: str, shape: tuple[int, ...]) -> str:
    """Return a checksum of everything but the rows, whose own checksums it includes."""
    hasher = xxhash.xxh3_128(f"{dtype} {shape}".encode())
    for name in ("starts", "digests", "sums"):
        hasher.update(np.ascontiguousarray(tables[name]).tobytes())
    return hasher.hexdigest()
