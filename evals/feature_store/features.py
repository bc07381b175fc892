"""The feature store: every image of a set is encoded once per checkpoint, and every task reads the stored features.

    STORE/images/KEY/manifest.json  part-00000.npy  part-00000.json …      STORE/texts/TOWER/part-HASH.npy
    part-HASH.json

KEY is a hash of the weights, the architecture, the preprocessing, the precision, the view, the set's identity and
stamp, and the storage type, so features are never used for other weights, transforms or data. A part's JSON (keys and
facts) is renamed into place after its array, so a part is complete or absent. Existing parts are not encoded again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparo_train.core.accelerator import device_name, is_streaming
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import DataError, SparoError
from sparo_train.core.files import write_whole
from sparo_train.core.world import World

from ..encoders.encoder import Encoder, TextEncoder
from ..sets.base import EvalSet, Transform, read_batches, split_batches
from .feature_table import (
    Features,
    Part,
    StoredTexts,
    View,
    open_part,
    part_bounds,
    write_part,
)
from .shared_images import SharedImages, begin_parts

_FIRST_ON_CPU, _FIRST_ON_ACCELERATOR = 256, 2048


class BatchSize:
    """Batch sizes by model, precision, view and device.

    Args:
        path: file that remembers them between runs; None: none.
        first: initial size; None: a size that suits the device.
    """

    def __init__(self, path: Path | None = None, first: int | None = None):
        self.path, self.first = path, first
        self._sizes: dict[str, int] = {}
        if path is not None and path.is_file():
            try:
                self._sizes = {str(k): int(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
            except (ValueError, AttributeError, TypeError):
                self._sizes = {}  # only a cache, which is filled again

    def known_size(self, encoder: Encoder, view: str) -> int:
        """Return the size that is known to fit."""
        first = self.first or (_FIRST_ON_CPU if encoder.device.type == "cpu" else _FIRST_ON_ACCELERATOR)
        return self._sizes.get(self._key(encoder, view), first)

    def run(self, encoder: Encoder, view: str, call: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """Return `call(pixels)`, computed in smaller pieces if memory does not suffice; the size that fits is remembered.

        Raises:
            SparoError: a single image does not fit.
        """
        size = self.known_size(encoder, view)
        while True:
            try:
                return torch.cat([call(piece).cpu() for piece in pixels.split(size)])
            except torch.OutOfMemoryError:
                if size == 1:
                    raise SparoError(
                        f"{encoder.label}: one image does not fit in the memory of {encoder.device}"
                    ) from None
            # The failed forward's cached blocks are too small to be reused.
            if is_streaming(encoder.device):
                torch.accelerator.empty_cache()
            size = max(1, min(size, len(pixels)) // 2)
            self._remember(self._key(encoder, view), size)

    def _remember(self, key: str, size: int) -> None:
        self._sizes[key] = size
        if self.path is not None:
            with suppress(OSError):  # only a cache
                write_whole(self.path, json.dumps(self._sizes, indent=1))

    def _key(self, encoder: Encoder, view: str) -> str:
        device = device_name(encoder.device) or "cpu"
        model = encoder.weights[:16] if self.path is not None else str(id(encoder))  # hashing takes time
        return f"{model} {encoder.precision} {view} {encoder.image_size} {device}"


logger = logging.getLogger(__name__)

Storage = Literal["fp32", "fp16"]
_TYPES = {"fp32": torch.float32, "fp16": torch.float16}
_TEXTS = 16384  # texts that are encoded before they are written
_FORMAT = 3  # layout of parts with XXH3 checksums
_SINGLE_PROCESS = Ranks(World(), "gloo", 0.0)


class FeatureStore:
    """Store of encodings.

    Args:
        root: a folder; None: encodings stay in memory.
        storage: dtype on disk and in memory maps; scores are always computed in fp32.
        on_progress: called with a set's name, the encoded images and their total.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        storage: Storage = "fp32",
        on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ):
        self._unwritable = False
        self._texts: dict[Path, StoredTexts] = {}
        self.root, self.on_progress = Path(root) if root else None, on_progress
        self.storage: Storage = storage
        self.batch = BatchSize(self.root / "batch_sizes.json" if self.root else None)

    def images(
        self,
        encoder: Encoder,
        source: EvalSet,
        transform: Transform | None = None,
        view: View | None = None,
        workers: int = 0,
        ranks: Ranks = _SINGLE_PROCESS,
        part: tuple[int, int] | None = None,
    ) -> Features | None:
        """Return the encodings of a set, after encoding the missing ones.

        Args:
            encoder: the model.
            source: the set.
            transform: default: the encoder's own.
            view: default: `encoder.encode`.
            workers: processes that decode images.
            ranks: each encodes its parts; all get all of them.
            part: (i, n): encode only the i-th of n shares, for independent processes (a SLURM array).

        Returns:
            None if `part` was given and parts of other processes are still missing.

        Raises:
            DataError: an image cannot be read, or an encoding is not finite.
        """
        of, shareable = None, view is None and transform is None
        if view is None:
            # Slots are masked when they are read, so one pass over the images serves any selection.
            encoder, of = encoder.to_store()
        view, transform = view or View("encode", encoder.encode), transform or encoder.transform
        job = _Job(encoder, source, transform, view, workers)
        spans = part_bounds(len(source))
        # Assigned by number, so that processes need no communication.
        share, num_shares = part or (ranks.rank, ranks.size)
        if self.root is None:
            parts: list[Part] = []
            ranks.call_on_all(lambda: parts.extend(self._encode_parts(job, spans[share::num_shares])))
            return _features(sorted((p for got in ranks.gather(parts) for p in got), key=lambda p: p.first), of)
        facts = self._facts(job)
        folder = self.root / "images" / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        if shareable:
            job = job._replace(shared=functools.partial(SharedImages, self.root / "images", facts, folder))
        if share == 0:
            self._try_write(lambda: write_whole(folder / "manifest.json", json.dumps(facts, indent=1)))
        local_parts: dict[int, Part] = {}
        loose = ranks.call_on_all(lambda: self._fill(folder, job, spans, share, num_shares, local_parts))
        if loose and part is not None:
            raise DataError(
                f"{self.root}: features that this process encoded could not be stored for the other processes. "
                f"Make space on the disk, or give another folder with --features."
            )
        for some in ranks.gather(loose):  # other ranks would look for what one rank could not write
            local_parts |= some
        all_parts = [local_parts.get(number) or open_part(folder, number, span) for number, span in enumerate(spans)]
        whole = [p for p in all_parts if p is not None]
        if len(whole) == len(all_parts):
            return _features(whole, of)
        if part is not None:
            return None
        raise DataError(f"{folder}: parts disappeared while they were read. Does another process clean this folder?")

    def texts(self, encoder: TextEncoder, captions: Sequence[str]) -> Tensor:
        """Return unit-norm fp32 encodings (n, D) of captions, each distinct one encoded once per text tower."""
        return self.text_rows(encoder, captions)(captions)

    def text_rows(self, encoder: TextEncoder, captions: Sequence[str]) -> Callable[[Sequence[str]], Tensor]:
        """Return a function from some of these captions to their encodings, so that not all are in memory twice, or at all with a store."""
        encodings = self._encode_texts(encoder, captions)
        return lambda some: torch.from_numpy(np.stack([encodings[caption] for caption in some]))

    def _encode_texts(self, encoder: TextEncoder, captions: Sequence[str]) -> dict[str, np.ndarray]:
        if self.root is None:
            distinct = list(dict.fromkeys(captions))
            return dict(zip(distinct, _finite(encoder.text(distinct), distinct).cpu().numpy(), strict=True))
        facts = {"format": _FORMAT, "tower": encoder.text_weights, "precision": encoder.precision}
        folder = self.root / "texts" / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        stored = self._texts.setdefault(folder, StoredTexts(folder))
        stored.refresh()
        # Sorted, because the part is named by its content.
        new = sorted(set(captions) - stored.rows.keys())
        loose: dict[str, np.ndarray] = {}
        for begin in range(0, len(new), _TEXTS):
            some = new[begin : begin + _TEXTS]
            encoded = _finite(encoder.text(some), some).cpu().numpy()
            if not self._try_write(functools.partial(stored.write, some, encoded)):
                loose |= dict(zip(some, encoded, strict=True))
        return {**stored.rows, **loose} if loose else stored.rows

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
            "storage": self._storage(job.view),
            "slots": encoder.slots,
        } | ({} if source.published else {"decoding": "as in training"})

    def _storage(self, view: View) -> Storage:
        return "fp32" if view.measured else self.storage

    def _fill(
        self,
        folder: Path,
        job: _Job,
        spans: list[tuple[int, int]],
        share: int,
        num_shares: int,
        local_parts: dict[int, Part],
    ) -> dict[int, Part]:
        """Encode this process's missing parts; `local_parts` receives verified ones. Returns those that could not be written."""
        for i in range(share, len(spans), num_shares):
            if (part := open_part(folder, i, spans[i])) is not None:
                local_parts[i] = part
        missing, loose = [i for i in range(share, len(spans), num_shares) if i not in local_parts], dict[int, Part]()
        for number, part in zip(missing, self._encode_parts(job, [spans[i] for i in missing]), strict=True):
            if not self._try_write(functools.partial(write_part, folder, number, part)):
                loose[number] = part
        return loose

    def _try_write(self, write: Callable[[], object]) -> bool:
        """Write to the store; if that fails, warn once and continue in memory."""
        try:
            write()
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                logger.warning(
                    f"{self.root}: features could not be stored ({error}). Scoring continues, and encodes them again next time."
                )
            return False
        return True

    def _encode_parts(self, job: _Job, spans: Sequence[tuple[int, int]]) -> Iterator[Part]:
        """Encode these parts one after another, with one set of workers."""
        size, done, total = (
            self.batch.known_size(job.encoder, job.view.name),
            0,
            sum(end - begin for begin, end in spans),
        )
        parts = begin_parts(job.source, spans, job.shared)
        cuts = [split_batches(part.unknown, size) for part in parts]
        numbers = [batch for cut in cuts for batch in cut]
        # Close the workers here: the traceback of a failed forward would keep them alive.
        with closing(read_batches(job.source, job.transform, numbers, job.workers)) as batches:
            for part, cut in zip(parts, cuts, strict=True):
                done += len(part.known)
                encoded, keys, facts = [], [], []
                for batch in islice(batches, len(cut)):
                    encodings = self.batch.run(job.encoder, job.view.name, job.view.encode, batch.pixels)
                    # Check in the storage dtype, because 16 bits overflow for finite encodings.
                    stored = encodings.to(_TYPES[self._storage(job.view)])
                    _refuse_non_finite(stored, batch.keys, str(job.source.root))
                    encoded.append(stored.numpy())
                    keys += batch.keys
                    facts += batch.facts
                    done += len(batch.keys)
                    self.on_progress(str(job.source.root), done, total)
                yield part.complete(job.source, encoded, keys, facts)


class _Job(NamedTuple):
    encoder: Encoder
    source: EvalSet
    transform: Transform
    view: View
    workers: int
    shared: Callable[[], SharedImages] | None = None


def _features(parts: Sequence[Part], of: Callable[[Tensor], Tensor] | None) -> Features:
    keys, facts = [k for p in parts for k in p.keys], [f for p in parts for f in p.facts]
    return Features([p.array for p in parts], keys, facts, of)


def _finite(encoded: Tensor, captions: Sequence[str]) -> Tensor:
    _refuse_non_finite(encoded, captions, "the text tower")
    return encoded


def _refuse_non_finite(encodings: Tensor, keys: Sequence[str], where: str) -> None:
    # Now, by key, because the image could not be found later in a mean over classes or a similarity.
    good = encodings.isfinite().flatten(1).all(dim=1)
    if not good.all():
        bad = int((~good).nonzero()[0])
        raise DataError(
            f"{where}: the encoding of {keys[bad]!r} is not finite (in its batch, {int((~good).sum())} of "
            f"{len(keys)} are not). If --precision or --storage is fp16, try bf16 or fp32 first. If that does not "
            "help, use an earlier checkpoint."
        )
