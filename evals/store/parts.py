"""Parts of stored features on disk: an array, and a JSON file that is renamed into place after it."""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from sparo_train.core.files import write_whole

from ..sets.base import Fact, Pair


class Part(NamedTuple):
    """Consecutive samples, the first of them by its number: encodings (n, D) or (n, L, D), keys, facts."""

    first: int
    array: np.ndarray
    keys: list[str]
    facts: list[Fact]


def bounds_of(count: int) -> list[tuple[int, int]]:
    """First and last + 1 of every part: 32 of them where that makes 256 to 4,096 images each."""
    size = max(256, min(4096, -(-count // 32)))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def write_part(folder: Path, number: int, part: Part) -> None:
    """Its JSON file last: a part without one is not there. Facts that are arrays (masks) lie in a file of their own."""
    tables = {str(i): fact for i, fact in enumerate(part.facts) if isinstance(fact, np.ndarray)}
    write_array(part_path(folder, number, "npy"), part.array)
    if tables:
        arrays: dict[str, Any] = tables
        _write(part_path(folder, number, "facts.npz"), lambda stream: np.savez_compressed(stream, **arrays))
    facts = [None if str(i) in tables else fact for i, fact in enumerate(part.facts)]
    content = {"first": part.first, "keys": part.keys, "facts": facts, "tables": len(tables)}
    write_whole(part_path(folder, number, "json"), json.dumps(content))


def open_part(folder: Path, number: int, span: tuple[int, int]) -> Part | None:
    """A part where it is whole."""
    begin, end = span
    try:
        content = json.loads(part_path(folder, number, "json").read_text(encoding="utf-8"))
        array = np.load(part_path(folder, number, "npy"), mmap_mode="r", allow_pickle=False)
        facts = [fact_of(fact) for fact in content["facts"]]
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


def fact_of(fact: Any) -> Fact:
    """JSON has no tuples: pairs come back as lists of four."""
    return [Pair(*p) for p in fact] if isinstance(fact, list) and fact and isinstance(fact[0], list) else fact


def part_path(folder: Path, number: int, suffix: str) -> Path:
    """Where a part's array (`npy`), facts (`json`) or facts that are arrays (`facts.npz`) lie."""
    return folder / f"part-{number:05d}.{suffix}"


def write_array(path: Path, array: np.ndarray) -> None:
    """Whole and on disk before the name exists."""
    _write(path, lambda stream: np.save(stream, array, allow_pickle=False))


def _write(path: Path, save: Callable[[IO[bytes]], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as stream:
            save(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def known_texts(folder: Path) -> dict[str, np.ndarray]:
    known: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("part-*.json")):
        try:
            texts = json.loads(path.read_text(encoding="utf-8"))
            array = np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            continue
        known |= dict(zip(texts, array, strict=True)) if len(texts) == len(array) else {}
    return known
