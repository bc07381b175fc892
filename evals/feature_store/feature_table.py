"""Stored features of a set: parts on disk, written once and memory-mapped, and the table of features, keys and metadata that they form."""

from __future__ import annotations

import json
import mmap
import os
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from sparo_train.core.files import write_whole

from ..sets.base import Fact, Pair
from ..tasks.clusters import first_copies


class Part(NamedTuple):
    """Consecutive samples from a first number: encodings (n, D) or (n, L, D), keys, facts, and digests of the images (n, 16) if they are shared."""

    first: int
    array: np.ndarray
    keys: list[str]
    facts: list[Fact]
    digests: np.ndarray | None = None


def part_bounds(count: int) -> list[tuple[int, int]]:
    """Return first and last + 1 of every part: 32 parts if that makes 256 to 4,096 images each."""
    # Small enough to lose little and to be distributed, large enough to be read at a disk's speed.
    size = max(256, min(4096, -(-count // 32)))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def write_part(folder: Path, number: int, part: Part) -> None:
    """Write a part, its JSON file last: a part without one does not exist. Facts that are arrays (masks) are in a separate file."""
    tables = {str(i): fact for i, fact in enumerate(part.facts) if isinstance(fact, np.ndarray)}
    hashes = {"npy": write_array(part_path(folder, number, "npy"), part.array)}
    if part.digests is not None:
        hashes["digests.npy"] = write_array(part_path(folder, number, "digests.npy"), part.digests)
    if tables:
        arrays: dict[str, Any] = tables
        path = part_path(folder, number, "facts.npz")
        hashes["facts.npz"] = _write(path, lambda stream: np.savez_compressed(stream, **arrays))
    facts = [None if str(i) in tables else fact for i, fact in enumerate(part.facts)]
    content = {"first": part.first, "keys": part.keys, "facts": facts, "tables": len(tables), "xxh3_128": hashes}
    write_sealed(part_path(folder, number, "json"), content)


def open_part(folder: Path, number: int, span: tuple[int, int]) -> Part | None:
    """Return a part if it is complete and undamaged."""
    begin, end = span
    try:
        content = read_sealed(part_path(folder, number, "json"))
        if any(_hash_file(part_path(folder, number, name)) != digest for name, digest in content["xxh3_128"].items()):
            return None
        # Mapped instead of read, because a bank of a million rows may not fit in memory.
        array = np.load(part_path(folder, number, "npy"), mmap_mode="r", allow_pickle=False)
        facts = [restore_tuples(fact) for fact in content["facts"]]
        if content.get("tables"):
            with np.load(part_path(folder, number, "facts.npz"), allow_pickle=False) as tables:
                for name in tables.files:
                    facts[int(name)] = tables[name]
                whole = len(tables.files) == content["tables"]
        else:
            whole = True
    except (OSError, ValueError, EOFError, KeyError, IndexError, zipfile.BadZipFile):
        return None
    if not whole or not len(array) == len(content["keys"]) == len(facts) == end - begin:
        return None
    return Part(begin, array, content["keys"], facts)


def read_part_digests(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the digests (n, 16) and encodings of every complete, undamaged part that has digests."""
    for path in sorted(folder.glob("part-*.digests.npy")):
        number = int(path.name.split("-")[1].split(".")[0])
        try:
            content = read_sealed(part_path(folder, number, "json"))
            if any(
                _hash_file(part_path(folder, number, name)) != digest for name, digest in content["xxh3_128"].items()
            ):
                continue
            array = np.load(part_path(folder, number, "npy"), mmap_mode="r", allow_pickle=False)
            digests = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError, KeyError, TypeError):
            continue
        if len(digests) == len(array):
            yield digests, array


def restore_tuples(fact: Any) -> Fact:
    """Restore tuples, which JSON does not have: pairs are stored as lists of four."""
    return [Pair(*p) for p in fact] if isinstance(fact, list) and fact and isinstance(fact[0], list) else fact


def part_path(folder: Path, number: int, suffix: str) -> Path:
    """Return the path of a part's array (`npy`), facts (`json`) or facts that are arrays (`facts.npz`)."""
    return folder / f"part-{number:05d}.{suffix}"


def write_array(path: Path, array: np.ndarray) -> str:
    """Write an array to disk before its name exists; return the file's XXH3-128."""
    return _write(path, lambda stream: np.save(stream, array, allow_pickle=False))


def write_sealed(path: Path, content: Any) -> None:
    """Write JSON after a line with its XXH3-128."""
    text = json.dumps(content)
    write_whole(path, f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")


def read_sealed(path: Path) -> Any:
    """Read what `write_sealed` wrote. Raises `ValueError` if it is damaged, `OSError` if it does not exist."""
    seal, _, text = path.read_text(encoding="utf-8").partition("\n")
    if seal != xxhash.xxh3_128_hexdigest(text.encode()):
        raise ValueError(f"{path}: is damaged")
    return json.loads(text)


def _hash_file(path: Path) -> str:
    # The check finds damage, not manipulation: who can write the array can write the hash. SHA-256 took a sixth of the
    # scoring.
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128_hexdigest(content)


def _write(path: Path, save: Callable[[IO[bytes]], None]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as stream:
            save(stream)
            stream.flush()
            os.fsync(stream.fileno())
        digest = _hash_file(temporary)
        temporary.replace(path)
        return digest
    finally:
        temporary.unlink(missing_ok=True)


def _text_part(texts: list[str]) -> str:
    return "part-" + xxhash.xxh3_128_hexdigest(json.dumps(texts).encode())[:16]


class StoredTexts:
    """Encodings of texts in a folder, by text; every part is read once, and mapped from its file.

    Attributes:
        rows: encoding (D,) of each text.
    """

    def __init__(self, folder: Path):
        self.folder, self.rows = folder, dict[str, np.ndarray]()
        self._parts: dict[str, tuple[int, int]] = {}

    def refresh(self) -> None:
        """Read undamaged parts that were written since the last call."""
        for path in sorted(self.folder.glob("part-*.json")):
            try:
                stat = path.stat()
                stamp = stat.st_mtime_ns, stat.st_size
                if self._parts.get(path.name) == stamp:
                    continue
                self._parts[path.name] = stamp
                content = read_sealed(path)
                if _hash_file(path.with_suffix(".npy")) == content["xxh3_128"]:
                    self._add(path.with_suffix(".npy"), content["texts"])
            except (OSError, ValueError, EOFError):
                continue

    def write(self, texts: list[str], array: np.ndarray) -> None:
        """Write encodings (n, D) of texts as a separate part, and map them."""
        name = _text_part(texts)
        write_sealed(
            self.folder / f"{name}.json",
            {"texts": texts, "xxh3_128": write_array(self.folder / f"{name}.npy", array)},
        )
        self._add(self.folder / f"{name}.npy", texts)

    def _add(self, path: Path, texts: list[str]) -> None:
        # As a plain array, whose rows are cheaper to make than those of a memory map.
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        self.rows |= dict(zip(texts, array, strict=True)) if len(texts) == len(array) else {}


class View(NamedTuple):
    """Function of an encoder that is stored: (n, 3, S, S) uint8 to (n, D); `name` identifies it with its options.

    measured: the stored values are labels, errors or distances, which stay fp32 whatever the storage type of encodings.
    """

    name: str
    encode: Callable[[Tensor], Tensor]
    measured: bool = False


class Features:
    """Encodings of a set with keys and facts, in parts that may be memory maps.

    Args:
        parts: (n_i, D), or (n_i, L, D) with separate slots, fp32 or fp16.
        keys, facts: one per row.
        of: function applied to rows (n, D) as they are read.
    """

    def __init__(
        self,
        parts: Sequence[np.ndarray],
        keys: Sequence[str],
        facts: Sequence[Fact],
        of: Callable[[Tensor], Tensor] | None = None,
    ):
        self.parts, self.keys, self.facts = list(parts), list(keys), list(facts)
        self._of = of or (lambda rows: rows)
        self._ends = list(accumulate(len(p) for p in self.parts))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        """Return the number of values in one encoding."""
        return int(np.prod(self.parts[0].shape[1:]))

    @cached_property
    def first_copies(self) -> list[int]:
        """Return for each row the number of the first row with an equal encoding, as `clusters.first_copies` does."""
        return first_copies(self.blocks())

    def blocks(self, rows: int = 8192) -> Iterator[Tensor]:
        """Yield fp32 (≤ rows, D), in order."""
        for part in self.parts:
            for begin in range(0, len(part), rows):
                yield self._of(_tensor(part[begin : begin + rows]))

    def in_memory(self) -> Tensor:
        """Return all rows, fp32 (n, D)."""
        return torch.cat(list(self.blocks()))

    def rows(self, numbers: Tensor) -> Tensor:
        """Return fp32 rows by number, in the given order."""
        out = torch.empty(len(numbers), *self.parts[0].shape[1:])
        part = torch.bucketize(numbers, torch.tensor(self._ends), right=True)
        for i in part.unique().tolist():
            here = (part == i).nonzero().flatten()
            local = numbers[here] - (self._ends[i - 1] if i else 0)
            out[here] = _tensor(self.parts[i][local.numpy()])
        return self._of(out)

    def share(self, rank: int, size: int) -> tuple[Features, int]:
        """Return the rank's consecutive parts, and the number of their first row."""
        first, last = (len(self.parts) * (rank + i) // size for i in (0, 1))
        begin, end = (self._ends[i - 1] if i else 0 for i in (first, last))
        return Features(self.parts[first:last], self.keys[begin:end], self.facts[begin:end], self._of), begin


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))  # a copy, because memory maps are read-only
