"""The feature store: every image of a set is encoded once per checkpoint; every task reads what is there.

    STORE/images/KEY/manifest.json  part-00000.npy  part-00000.json …      STORE/texts/TOWER/part-HASH.npy  part-HASH.json

KEY is a hash of the weights, the architecture, the preprocessing, the precision, the view, the set's identity and stamp,
and the storage type, so that nothing is ever read for other weights, transforms or data. A part's JSON (keys and facts)
is renamed into place after its array, so that a part is whole or absent; what is there already is not encoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparo_train.core.distributed import Ranks, World
from sparo_train.core.errors import DataError, SparoError
from sparo_train.core.files import write_whole

from .batches import BatchSize
from .encoders import Encoder, TextEncoder
from .sets.base import EvalSet, Fact, Pair, Transform, batched, read_batches

Storage = Literal["fp32", "fp16"]
_TYPES = {"fp32": np.float32, "fp16": np.float16}
_FORMAT = 1
_ALONE = Ranks(World(), "gloo", 0.0)


class View(NamedTuple):
    """Which function of an encoder is stored: (n, 3, S, S) uint8 to (n, D); `name` says it all, its options included."""

    name: str
    encode: Callable[[Tensor], Tensor]


class Features:
    """Encodings of a set with keys and facts, in parts that may be memory maps.

    Args:
        parts: (n_i, D) fp32 or fp16.  keys, facts: one per row.
        of: what is done to rows (n, D) as they are read.
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
        return self.parts[0].shape[1]

    def blocks(self, rows: int = 8192) -> Iterator[Tensor]:
        """fp32 (≤ rows, D), in order."""
        for part in self.parts:
            for begin in range(0, len(part), rows):
                yield self._of(_tensor(part[begin : begin + rows]))

    def whole(self) -> Tensor:
        """fp32 (n, D), in memory."""
        return torch.cat(list(self.blocks()))

    def rows(self, numbers: Tensor) -> Tensor:
        """fp32 rows by number, in the order asked."""
        out = torch.empty(len(numbers), self.width)
        part = torch.bucketize(numbers, torch.tensor(self._ends), right=True)
        for i in part.unique().tolist():
            here = (part == i).nonzero().flatten()
            local = numbers[here] - (self._ends[i - 1] if i else 0)
            out[here] = _tensor(self.parts[i][local.numpy()])
        return self._of(out)

    def share(self, rank: int, size: int) -> tuple[Features, int]:
        """The rank's consecutive parts, and the number of their first row."""
        first, last = (len(self.parts) * (rank + i) // size for i in (0, 1))
        begin, end = (self._ends[i - 1] if i else 0 for i in (first, last))
        return Features(self.parts[first:last], self.keys[begin:end], self.facts[begin:end], self._of), begin


class FeatureStore:
    """Where encodings are kept.

    Args:
        root: a folder; None keeps nothing, and encodings live in memory.
        storage: type on disk and in memory maps; scores are computed in fp32 whatever it is.
        report: told a set's name, the images done and how many there are.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        storage: Storage = "fp32",
        report: Callable[[str, int, int], None] = lambda name, done, total: None,
    ):
        self.root, self.storage, self.report = Path(root) if root else None, storage, report
        self.batch = BatchSize(self.root / "batch_sizes.json" if self.root else None)

    def images(
        self,
        encoder: Encoder,
        source: EvalSet,
        transform: Transform | None = None,
        view: View | None = None,
        workers: int = 0,
        ranks: Ranks = _ALONE,
        part: tuple[int, int] | None = None,
    ) -> Features | None:
        """The encodings of a set, as far as they are not there already.

        Args:
            transform: default: the encoder's own.
            view: default: `encoder.encode`.
            ranks: each encodes its parts; all get all of them.
            part: (i, n): only the i-th of n shares, for processes that do not know each other (a SLURM array).

        Returns:
            None where `part` was given and other processes' parts are missing still.

        Raises:
            DataError: an image that cannot be read, or an encoding that is not finite.
        """
        of = None
        if view is None:
            encoder, of = encoder.stored()
        view, transform = view or View("encode", encoder.encode), transform or encoder.transform
        job = _Job(encoder, source, transform, view, workers)
        bounds = _bounds(len(source))
        own, among = part or (ranks.rank, ranks.size)
        if self.root is None:
            parts = list(self._encoded(job, bounds[own::among]))
            return _features(sorted((p for got in ranks.gather(parts) for p in got), key=lambda p: p.first), of)
        facts = self._facts(job)
        folder = self.root / "images" / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        if own == 0:
            write_whole(folder / "manifest.json", json.dumps(facts, indent=1))
        together(ranks, lambda: self._fill(folder, job, bounds, own, among))
        found = [_open(folder, number, span) for number, span in enumerate(bounds)]
        whole = [p for p in found if p is not None]
        if len(whole) == len(found):
            return _features(whole, of)
        if part is not None:
            return None
        raise DataError(f"{folder}: parts vanished while they were read; do several processes clean this store?")

    def texts(self, encoder: TextEncoder, captions: Sequence[str]) -> Tensor:
        """Unit-norm fp32 encodings (n, D) of captions, each distinct one encoded once per text tower."""
        if self.root is None:
            return encoder.text(captions)
        facts = {"format": _FORMAT, "tower": encoder.text_weights, "precision": encoder.precision}
        folder = self.root / "texts" / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        known = _known_texts(folder)
        new = sorted(set(captions) - known.keys())
        if new:
            encoded = encoder.text(new)
            _refuse_non_finite(encoded, new, "the text tower")
            name = "part-" + hashlib.sha256(json.dumps(new).encode()).hexdigest()[:16]
            _write_array(folder / f"{name}.npy", encoded.numpy())
            write_whole(folder / f"{name}.json", json.dumps(new))
            known |= {caption: encoded[i].numpy() for i, caption in enumerate(new)}
        return torch.from_numpy(np.stack([known[caption] for caption in captions]))

    def _facts(self, job: _Job) -> dict[str, Any]:
        encoder, source = job.encoder, job.source
        return {
            "format": _FORMAT,
            "checkpoint": {"sha256": encoder.weights, "architecture": encoder.architecture},
            "preprocessing": repr(job.transform),
            "normalisation": [encoder.mean.flatten().tolist(), encoder.std.flatten().tolist()],
            "precision": encoder.precision,
            "view": job.view.name,
            "data": {"sha256": source.identity(), "stamp": source.stamp(), "n": len(source), "root": str(source.root)},
            "storage": self.storage,
            "slots": encoder.slots,
        }

    def _fill(self, folder: Path, job: _Job, bounds: list[tuple[int, int]], own: int, of: int) -> None:
        """Encode this process's parts that are missing."""
        missing = [i for i in range(own, len(bounds), of) if _open(folder, i, bounds[i]) is None]
        for number, part in zip(missing, self._encoded(job, [bounds[i] for i in missing]), strict=True):
            _write_array(_name(folder, number, "npy"), part.array)
            facts = {"first": part.first, "keys": part.keys, "facts": part.facts}
            write_whole(_name(folder, number, "json"), json.dumps(facts))

    def _encoded(self, job: _Job, spans: Sequence[tuple[int, int]]) -> Iterator[_Part]:
        """These parts, one after another, read by one set of workers."""
        size, done, total = self.batch.of(job.encoder, job.view.name), 0, sum(end - begin for begin, end in spans)
        cuts = [batched(range(begin, end), size) for begin, end in spans]
        batches = read_batches(job.source, job.transform, [batch for cut in cuts for batch in cut], job.workers)
        for (begin, _), cut in zip(spans, cuts, strict=True):
            encoded, keys, facts = [], [], []
            for batch in islice(batches, len(cut)):
                found = self.batch.run(job.encoder, job.view.name, job.view.encode, batch.pixels)
                _refuse_non_finite(found, batch.keys, str(job.source.root))
                encoded.append(found.numpy().astype(_TYPES[self.storage], copy=False))
                keys += batch.keys
                facts += batch.facts
                done += len(batch.keys)
                self.report(str(job.source.root), done, total)
            yield _Part(begin, np.concatenate(encoded), keys, facts)


class _Job(NamedTuple):
    encoder: Encoder
    source: EvalSet
    transform: Transform
    view: View
    workers: int


class _Part(NamedTuple):
    first: int
    array: np.ndarray
    keys: list[str]
    facts: list[Fact]


def _bounds(count: int) -> list[tuple[int, int]]:
    """First and last + 1 of every part: 32 of them where that makes 256 to 4,096 images each."""
    size = max(256, min(4096, -(-count // 32)))
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _features(parts: Sequence[_Part], of: Callable[[Tensor], Tensor] | None) -> Features:
    keys, facts = [k for p in parts for k in p.keys], [f for p in parts for f in p.facts]
    return Features([p.array for p in parts], keys, facts, of)


def together(ranks: Ranks, call: Callable[[], None]) -> None:
    """Run `call` on every rank; where it fails on one, all of them fail."""
    failed: SparoError | None = None
    try:
        call()
    except SparoError as error:
        failed = error
    reasons = [reason for reason in ranks.gather(str(failed) if failed else None) if reason]
    if failed is not None:
        raise failed
    if reasons:
        error = DataError(reasons[0])
        error.repeated = True
        raise error


def _open(folder: Path, number: int, span: tuple[int, int]) -> _Part | None:
    """A part where it is whole."""
    begin, end = span
    try:
        facts = json.loads(_name(folder, number, "json").read_text(encoding="utf-8"))
        array = np.load(_name(folder, number, "npy"), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if len(array) != end - begin or len(facts["keys"]) != end - begin:
        return None
    return _Part(begin, array, facts["keys"], [_fact(fact) for fact in facts["facts"]])


def _fact(fact: Any) -> Fact:
    """JSON has no tuples: pairs come back as lists of four."""
    return [Pair(*p) for p in fact] if isinstance(fact, list) and fact and isinstance(fact[0], list) else fact


def _name(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"part-{number:05d}.{suffix}"


def _write_array(path: Path, array: np.ndarray) -> None:
    """Whole and on disk before the name exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _known_texts(folder: Path) -> dict[str, np.ndarray]:
    known: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("part-*.json")):
        try:
            texts = json.loads(path.read_text(encoding="utf-8"))
            array = np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            continue
        known |= dict(zip(texts, array, strict=True)) if len(texts) == len(array) else {}
    return known


def _refuse_non_finite(found: Tensor, keys: Sequence[str], where: str) -> None:
    good = found.isfinite().flatten(1).all(dim=1)
    if not good.all():
        bad = int((~good).nonzero()[0])
        raise DataError(
            f"{where}: the encoding of {keys[bad]!r} is not finite ({int((~good).sum())} of {len(keys)} in its batch); "
            "is the checkpoint whole? fp16 overflows where bf16 and fp32 do not"
        )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))  # a copy: memory maps are read-only
