"""Encodings of images that other sets of the store contain, too: COCO's validation images are in a dozen sets, and are encoded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..sets.base import EvalSet, Fact
from ..sets.image_files import FileSet
from .feature_table import Part, read_part_digests

_LENGTH = 16  # bytes of a digest


def digest_images(source: EvalSet, numbers: Sequence[int]) -> np.ndarray | None:
    """Return (n, 16) uint8, a digest of the content of each image; None if a set's images are not shared."""
    if not isinstance(source, FileSet) or not source.shares_images:
        return None
    return np.frombuffer(b"".join(source.digest(number) for number in numbers), np.uint8).reshape(-1, _LENGTH)


class SharedImages:
    """Rows of encodings by digest.

    Args:
        root: folder of the store's image encodings.
        facts: everything that the encodings depend on; sets that differ in `data` only can be shared.
        own: folder of the set itself, which is not searched.
    """

    def __init__(self, root: Path, facts: Mapping[str, Any], own: Path):
        self._rows: dict[bytes, tuple[np.ndarray, int]] = {}
        for folder in _folders(root, facts, own):
            for digests, array in read_part_digests(folder):
                for row, digest in enumerate(digests):
                    self._rows.setdefault(digest.tobytes(), (array, row))

    def rows(self, digests: np.ndarray) -> dict[int, np.ndarray]:
        """Return the encodings that are known, by position in `digests`."""
        found = ((place, self._rows.get(digest.tobytes())) for place, digest in enumerate(digests))
        return {place: entry[0][entry[1]] for place, entry in found if entry is not None}


def _folders(root: Path, facts: Mapping[str, Any], own: Path) -> Iterator[Path]:
    wanted = json.loads(json.dumps({name: value for name, value in facts.items() if name != "data"}))
    for path in sorted(root.glob("*/manifest.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            content.pop("data", None)
        if content == wanted and path.parent != own:
            yield path.parent


class IncompletePart(NamedTuple):
    """A part before its images are encoded.

    Attributes:
        begin, end: numbers of its first image, and of the one after the last.
        unknown: images that must be encoded.
        known: encodings from other sets, by number.
        digests: digests of all its images; None: the set shares none.
    """

    begin: int
    end: int
    unknown: Sequence[int]
    known: Mapping[int, np.ndarray]
    digests: np.ndarray | None

    def complete(self, source: EvalSet, encoded: Sequence[np.ndarray], keys: list[str], facts: list[Fact]) -> Part:
        """Return the part with the encodings, keys and facts of its unknown images, in order."""
        if not self.known:
            return Part(self.begin, np.concatenate(encoded), keys, facts, self.digests)
        assert isinstance(source, FileSet)
        rows = dict(zip(self.unknown, [row for block in encoded for row in block], strict=True)) | dict(self.known)
        described = dict(zip(self.unknown, zip(keys, facts, strict=True), strict=True))
        described |= {number: source.describe(number) for number in self.known}
        order = range(self.begin, self.end)
        all_keys, all_facts = zip(*(described[number] for number in order), strict=True)
        return Part(self.begin, np.stack([rows[number] for number in order]), [*all_keys], [*all_facts], self.digests)


def begin_parts(
    source: EvalSet, spans: Sequence[tuple[int, int]], shared: Callable[[], SharedImages] | None
) -> list[IncompletePart]:
    """Return the parts of a set with these spans, with the encodings that other sets have.

    Args:
        source, spans: the set, and first number and last + 1 of each part.
        shared: opens the encodings of other sets, if there is anything to look up; None: there are none.
    """
    digests = [None if shared is None else digest_images(source, range(*span)) for span in spans]
    table = shared() if shared is not None and any(found is not None for found in digests) else None
    parts = []
    for (begin, end), found in zip(spans, digests, strict=True):
        rows = {} if found is None or table is None else table.rows(found)
        known = {begin + place: row for place, row in rows.items()}
        parts.append(IncompletePart(begin, end, [n for n in range(begin, end) if n not in known], known, found))
    return parts
