"""Tokens of frozen towers, computed once: found by the content of what they are tokens of, whatever shard it lies in.

    FOLDER/KEY/manifest.json  PART.safetensors …

KEY is a hash of everything that decides what the tokens are (weights, sizes, pixels, precision), PART of a run of samples.
A part holds, for its n entries, `rows` (all their tokens, one entry after another), `starts` (n + 1), `digests` (n, 16) and
`sums` (n), the XXH3 of each entry's rows, which is looked at whenever they are read.
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


def digest_of(content: bytes) -> bytes:
    """Sixteen bytes that stand for an image's file, or for the ids of a caption."""
    return xxhash.xxh3_128_digest(content)


class TokenCache:
    """One tower's tokens.

    Args:
        folder: of all towers of all runs.
        facts: what decides what the tokens are; plain values.
        dtype: `fp16`, half the space, or `fp32`, what the tower gave.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key_fields: Mapping[str, Any], dtype: str):
        manifest = {"format": _FORMAT, "dtype": dtype, **key_fields}
        text = json.dumps(manifest, sort_keys=True)
        self.folder, self._type = folder / hashlib.sha256(text.encode()).hexdigest()[:32], _TYPES[dtype]
        self._write(self.folder / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())

    def has(self, part: str) -> bool:
        """Whether a part is there, as long as it was, its tables what was written."""
        return self._tables(part) is not None

    def write(self, part: str, digests: Sequence[bytes], entries: Sequence[np.ndarray]) -> None:
        """Keep the tokens (N, d) of a part's entries, whole or not at all.

        Raises:
            DataError: nothing can be written, or numbers are not finite in this type.
        """
        # Overflow to infinity is looked for right below, and told with what mends it.
        with np.errstate(over="ignore"):
            rows = np.concatenate(entries).astype(self._type) if entries else np.zeros((0, 1), self._type)
        if not np.isfinite(rows).all():
            raise DataError(
                "objective.cache: tokens are not finite; where they are too large for 16 bits set objective.cache.dtype=fp32"
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
        """Find entries in these parts from now on. Workers that are forked behind this share the index."""
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
        # Sorted by half of the digest: a search in memory, and a run of equals is hardly ever longer than one.
        order = np.argsort(joined[0], kind="stable")
        self._high, self._low, self._part, self._start, self._end, self._sums = (some[order] for some in joined)

    def __len__(self) -> int:
        """Entries that can be found."""
        return len(self._high)

    def read(self, digest: bytes) -> np.ndarray | None:
        """Tokens (N, d) by the digest of what they are of; None where there are none.

        Raises:
            DataError: they are not what was written.
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
        try:  # read, not mapped: a file that is cut off meanwhile would end the process
            with path.open("rb", buffering=0) as file:
                # By position on a handle of its own: forked workers would move each other's place.
                content = os.pread(file.fileno(), (last - first) * row, self._begin[number] + first * row)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error}). Start again to compute it again.") from None
        rows = np.frombuffer(bytearray(content[: len(content) // row * row]), self._type).reshape(-1, self._width)
        if _sum(rows) != int(self._sums[at].view(np.uint64)):
            raise DataError(f"{path}: is damaged. Remove it, and it will be computed again.")
        return rows

    def _tables(self, part: str) -> dict[str, Any] | None:
        """A part's tables, the width of its rows and where in the file they begin; None where it is not there, or not what was written."""
        path = self._path(part)
        try:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            with safe_open(path, "np") as file:  # refuses a file that is not as long as its header says
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
    """Of everything but the rows themselves, whose sums are among it."""
    hasher = xxhash.xxh3_128(f"{dtype} {shape}".encode())
    for name in ("starts", "digests", "sums"):
        hasher.update(np.ascontiguousarray(tables[name]).tobytes())
    return hasher.hexdigest()
