"""The feature store: every image of a set is encoded once per checkpoint; every task reads what is there.

    STORE/images/KEY/manifest.json  part-00000.npy  part-00000.json …      STORE/texts/TOWER/part-HASH.npy  part-HASH.json

KEY is a hash of the weights, the architecture, the preprocessing, the precision, the view, the set's identity and stamp,
and the storage type, so that nothing is ever read for other weights, transforms or data. A part's JSON (keys and facts)
is renamed into place after its array, so that a part is whole or absent; what is there already is not encoded again.
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

from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import DataError, SparoError
from sparo_train.core.files import write_whole
from sparo_train.core.world import World

from ..encoders.encoder import Encoder, TextEncoder
from ..sets.base import EvalSet, Transform, batched, read_batches
from .feature_table import Features, Part, View, bounds_of, open_part, read_texts, write_part, write_texts

_FIRST = {"cpu": 256, "cuda": 2048}


class BatchSize:
    """Batch sizes by model, precision, view and device.

    Args:
        path: where they are remembered between runs; None: nowhere.
        first: what to begin with by device type.
    """

    def __init__(self, path: Path | None = None, first: dict[str, int] | None = None):
        self.path, self.first = path, first or _FIRST
        self._sizes: dict[str, int] = {}
        if path is not None and path.is_file():
            try:
                self._sizes = {str(k): int(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
            except (ValueError, AttributeError, TypeError):
                self._sizes = {}  # it is only a memory: found again

    def of(self, encoder: Encoder, view: str) -> int:
        """What fits as far as we know."""
        return self._sizes.get(self._key(encoder, view), self.first[encoder.device.type])

    def run(self, encoder: Encoder, view: str, call: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """`call(pixels)`, in smaller pieces where the memory does not suffice; what sufficed is remembered.

        Raises:
            SparoError: a single image does not fit.
        """
        size = self.of(encoder, view)
        while True:
            try:
                return torch.cat([call(piece).cpu() for piece in pixels.split(size)])
            except torch.OutOfMemoryError:
                if size == 1:
                    raise SparoError(
                        f"{encoder.label}: one image does not fit into the memory of {encoder.device}"
                    ) from None
            # What the failed forward held is cached in pieces that do not fit.
            torch.cuda.empty_cache()
            size = max(1, min(size, len(pixels)) // 2)
            self._remember(self._key(encoder, view), size)

    def _remember(self, key: str, size: int) -> None:
        self._sizes[key] = size
        if self.path is not None:
            with suppress(OSError):  # it is only a memory
                write_whole(self.path, json.dumps(self._sizes, indent=1))

    def _key(self, encoder: Encoder, view: str) -> str:
        device = torch.cuda.get_device_name(encoder.device) if encoder.device.type == "cuda" else "cpu"
        model = encoder.weights[:16] if self.path is not None else str(id(encoder))  # a hash takes its time
        return f"{model} {encoder.precision} {view} {encoder.image_size} {device}"


logger = logging.getLogger(__name__)

Storage = Literal["fp32", "fp16"]
_TYPES = {"fp32": torch.float32, "fp16": torch.float16}
_FORMAT = 3  # parts with XXH3 checksums
_SINGLE_PROCESS = Ranks(World(), "gloo", 0.0)


class FeatureStore:
    """Where encodings are kept.

    Args:
        root: a folder; None keeps nothing, and encodings live in memory.
        storage: type on disk and in memory maps; scores are computed in fp32 whatever it is.
        on_progress: told a set's name, the images done and how many there are.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        storage: Storage = "fp32",
        on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ):
        self._unwritable = False
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
            # Slots are masked as they are read: one pass over the images serves any choice of them.
            encoder, of = encoder.stored()
        view, transform = view or View("encode", encoder.encode), transform or encoder.transform
        job = _Job(encoder, source, transform, view, workers)
        spans = bounds_of(len(source))
        # Dealt by number, so that nobody has to be told what others do.
        share, num_shares = part or (ranks.rank, ranks.size)
        if self.root is None:
            parts: list[Part] = []
            ranks.call_on_all(lambda: parts.extend(self._encode_parts(job, spans[share::num_shares])))
            return _features(sorted((p for got in ranks.gather(parts) for p in got), key=lambda p: p.first), of)
        facts = self._facts(job)
        folder = self.root / "images" / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        if share == 0:
            self._try_write(lambda: write_whole(folder / "manifest.json", json.dumps(facts, indent=1)))
        local_parts: dict[int, Part] = {}
        loose = ranks.call_on_all(lambda: self._fill(folder, job, spans, share, num_shares, local_parts))
        if loose and part is not None:
            raise DataError(
                f"{self.root}: this share cannot be kept for the others; free space there, or give another --features"
            )
        for some in ranks.gather(loose):  # what one rank could not write, the others would look for
            local_parts |= some
        all_parts = [local_parts.get(number) or open_part(folder, number, span) for number, span in enumerate(spans)]
        whole = [p for p in all_parts if p is not None]
        if len(whole) == len(all_parts):
            return _features(whole, of)
        if part is not None:
            return None
        raise DataError(f"{folder}: parts vanished while they were read; do several processes clean this store?")

    def texts(self, encoder: TextEncoder, captions: Sequence[str]) -> Tensor:
        """Unit-norm fp32 encodings (n, D) of captions, each distinct one encoded once per text tower."""
        if self.root is None:
            return _finite(encoder.text(captions), captions)
        facts = {"format": _FORMAT, "tower": encoder.text_weights, "precision": encoder.precision}
        folder = self.root / "texts" / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        encodings = read_texts(folder)
        # Sorted, because the part is named by its content.
        new = sorted(set(captions) - encodings.keys())
        if new:
            encoded = _finite(encoder.text(new), new)
            self._try_write(lambda: write_texts(folder, new, encoded.numpy()))
            encodings |= {caption: encoded[i].numpy() for i, caption in enumerate(new)}
        return torch.from_numpy(np.stack([encodings[caption] for caption in captions]))

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
        }

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
        """Encode this process's parts that are missing; `local_parts` gets those that are verified. Returns those that could not be written."""
        for i in range(share, len(spans), num_shares):
            if (part := open_part(folder, i, spans[i])) is not None:
                local_parts[i] = part
        missing, loose = [i for i in range(share, len(spans), num_shares) if i not in local_parts], dict[int, Part]()
        for number, part in zip(missing, self._encode_parts(job, [spans[i] for i in missing]), strict=True):
            if not self._try_write(functools.partial(write_part, folder, number, part)):
                loose[number] = part
        return loose

    def _try_write(self, write: Callable[[], object]) -> bool:
        """Write into the store; where that fails the scoring goes on from memory, and says so once."""
        try:
            write()
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                logger.warning(f"{self.root}: features cannot be kept there ({error}); scoring goes on without")
            return False
        return True

    def _encode_parts(self, job: _Job, spans: Sequence[tuple[int, int]]) -> Iterator[Part]:
        """These parts, one after another, read by one set of workers."""
        size, done, total = self.batch.of(job.encoder, job.view.name), 0, sum(end - begin for begin, end in spans)
        cuts = [batched(range(begin, end), size) for begin, end in spans]
        numbers = [batch for cut in cuts for batch in cut]
        # Closed here: what fails in a forward is kept by its traceback, and with it the workers would be.
        with closing(read_batches(job.source, job.transform, numbers, job.workers)) as batches:
            for (begin, _), cut in zip(spans, cuts, strict=True):
                encoded, keys, facts = [], [], []
                for batch in islice(batches, len(cut)):
                    encodings = self.batch.run(job.encoder, job.view.name, job.view.encode, batch.pixels)
                    # As they are stored: 16 bits overflow where what was encoded was sound.
                    stored = encodings.to(_TYPES[self._storage(job.view)])
                    _refuse_non_finite(stored, batch.keys, str(job.source.root))
                    encoded.append(stored.numpy())
                    keys += batch.keys
                    facts += batch.facts
                    done += len(batch.keys)
                    self.on_progress(str(job.source.root), done, total)
                yield Part(begin, np.concatenate(encoded), keys, facts)


class _Job(NamedTuple):
    encoder: Encoder
    source: EvalSet
    transform: Transform
    view: View
    workers: int


def _features(parts: Sequence[Part], of: Callable[[Tensor], Tensor] | None) -> Features:
    keys, facts = [k for p in parts for k in p.keys], [f for p in parts for f in p.facts]
    return Features([p.array for p in parts], keys, facts, of)


def _finite(encoded: Tensor, captions: Sequence[str]) -> Tensor:
    _refuse_non_finite(encoded, captions, "the text tower")
    return encoded


def _refuse_non_finite(encodings: Tensor, keys: Sequence[str], where: str) -> None:
    # Now, by key: in a mean over classes or a similarity nobody would find the image again.
    good = encodings.isfinite().flatten(1).all(dim=1)
    if not good.all():
        bad = int((~good).nonzero()[0])
        raise DataError(
            f"{where}: the encoding of {keys[bad]!r} is not finite ({int((~good).sum())} of {len(keys)} in its batch); "
            "is the checkpoint whole? fp16 (--precision, --storage) overflows where bf16 and fp32 do not"
        )
