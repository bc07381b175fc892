"""`sparo data check`: count samples, find duplicates, and decode everything once."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import ImageOps

from evals.sets.pictures import label_image
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.decode.decoding import notes, open_picture, refuse_unclear_rotation
from sparo_train.data.examples.samples import MAX_CAPTION_CHARS, MAX_WORD_CHARS, caption, image_bytes
from sparo_train.data.examples.survey import ImageFacts, Measures, Survey, image_facts, summarize
from sparo_train.data.sources.base import SourceConfig, Storage, close_storages
from sparo_train.data.video.episode import Episode, is_episode
from sparo_train.data.video.views import MultiViewScene, is_scene

from .pool import process_pool

_EXAMPLES = 20
_CONTEXT = 77  # tokens of the longest captions that a shipped recipe reads
_LONG = re.compile(rf"\S{{{MAX_WORD_CHARS}}}|^.{{{MAX_CAPTION_CHARS}}}", re.DOTALL)


class ShardReport(NamedTuple):
    """Content of one shard.

    Attributes:
        bad: (key, reason) of unusable samples.
        keys, images, captions, looks: 64-bit hashes, 0 if absent; images of the same look are similar.
        notes: number of usable images that are unusual, by property.
        details: causes of unusable samples, by key.
    """

    url: str
    samples: int
    intact: bool
    bad: list[tuple[str, str]]
    keys: np.ndarray
    images: np.ndarray
    captions: np.ndarray
    looks: np.ndarray
    measures: Measures
    notes: Mapping[str, int] = {}
    details: Mapping[str, str] = {}

    @property
    def damage(self) -> str | None:
        """Return the problem of the tar itself, if any."""
        if self.intact:
            return None if self.samples else "no sample"
        return "truncated tar" if self.samples else "unreadable tar"


class Duplicates(NamedTuple):
    """Number of copies after the first, and the samples (shard, key) of the first groups of equal ones."""

    copies: int
    examples: list[list[tuple[str, str]]]


class Report(NamedTuple):
    """All shards of a source."""

    shards: list[ShardReport]
    keys: Duplicates
    images: Duplicates
    captions: Duplicates
    looks: Duplicates

    @property
    def samples(self) -> int:
        return sum(s.samples for s in self.shards)

    def notes(self) -> dict[str, int]:
        """Count usable images that training treats specially: rotated, composited on white, mapped to 8 bits, first frame only."""
        counts: Counter[str] = Counter()
        for shard in self.shards:
            counts.update(shard.notes)
        return dict(counts.most_common())

    def survey(self) -> Survey | None:
        """Return formats, sizes and colours of the usable images; None for videos and scenes."""
        return summarize(shard.measures for shard in self.shards)

    def reasons(self) -> dict[str, int]:
        """Count unusable samples by reason, and incomplete shards."""
        counts = Counter(reason for s in self.shards for _, reason in s.bad)
        counts.update(s.damage for s in self.shards if s.damage)
        return dict(counts)


def check(
    storages: Sequence[Storage],
    config: SourceConfig,
    processes: int = 2,
    on_progress: Callable[[int], None] | None = None,
    pixel_range: PixelRange = "by_type",
    bands: tuple[int, ...] | None = None,
) -> Report:
    """Read, decode and hash every sample.

    Args:
        storages: of the source, such as shards.
        config: the source.
        processes: number of processes.
        on_progress: called with the number of finished shards.
        pixel_range, bands: training's `data.pixel_range` and `data.bands`.
    """
    shards = []
    count = len(storages)
    with process_pool(processes, count) as pool:
        for shard in pool.map(check_storage, storages, [config] * count, [pixel_range] * count, [bands] * count):
            shards.append(shard)
            if on_progress:
                on_progress(len(shards))
    duplicates = [_duplicates(shards, storages, name) for name in ("keys", "images", "captions", "looks")]
    close_storages()
    return Report(shards, *duplicates)


def check_storage(
    storage: Storage,
    config: SourceConfig,
    pixel_range: PixelRange = "by_type",
    bands: tuple[int, ...] | None = None,
) -> ShardReport:
    """Check one shard."""
    bad: list[tuple[str, str]] = []
    captioned: bool | None = None
    note_counts: Counter[str] = Counter()
    details: dict[str, str] = {}
    hashes = np.zeros((4, len(storage)), dtype=np.uint64)
    measures = Measures()
    for ordinal in range(len(storage)):
        key = f"number {ordinal}"
        try:
            key, fields = storage.read(ordinal)
            # Eight bytes of each hash, so that a billion samples fit into memory.
            hashes[0, ordinal] = _hash(key.encode("utf-8", "surrogateescape"))
            captioned = (
                _needs_caption(fields, config) if captioned is None else captioned
            )  # judged by the shard's first sample
            text, data, facts = _check_sample(fields, config, captioned, note_counts, pixel_range, bands)
            hashes[1, ordinal] = _hash(data)
            if facts is not None:
                measures.add(facts)
                hashes[3, ordinal] = facts.look
            if text is not None:
                hashes[2, ordinal] = _hash(text.encode("utf-8", "surrogatepass"))
        except BadSampleError as problem:
            bad.append((problem.key or key, str(problem)))
            if problem.detail:
                details[key] = problem.detail
    close_storages()
    keys, images, captions, looks = hashes
    return ShardReport(
        storage.url,
        len(storage),
        storage.intact,
        bad,
        keys,
        images,
        captions,
        looks,
        measures.pack(),
        note_counts,
        details,
    )


def _needs_caption(fields: Mapping[str, bytes], config: SourceConfig) -> bool:
    """Return whether samples like this one are used for their captions, rather than for labels, masks or objects."""
    if not config.caption_key or not config.has_captions:
        return False
    keys = [config.caption_key, *(config.captions or ())]
    labelled = {"cls", "mask.png"} & fields.keys() or is_scene(fields) or b'"objects"' in fields.get("json", b"")
    return any(config.caption_member(key)[0] in fields for key in keys if key) or not labelled


def _check_sample(
    fields: Mapping[str, bytes],
    config: SourceConfig,
    captioned: bool,
    note_counts: Counter[str],
    pixel_range: PixelRange,
    bands: tuple[int, ...] | None,
) -> tuple[str | None, bytes, ImageFacts | None]:
    """Check a sample's caption, if it needs one, and its image, or all frames of a video or a scene with several cameras.

    Raises:
        BadSampleError: training could not use it.
    """
    if is_episode(fields) or is_scene(fields):
        if is_scene(fields):
            scene = MultiViewScene(fields, config.image_keys, pixel_range)
            scene.check()
            episodes = scene.views
        else:
            episodes = [Episode(fields, config.image_keys, pixel_range)]
        for episode in episodes:
            episode.check_structure()
            for t in range(len(episode)):
                episode.check(t)
        return None, b"".join(data for name, data in fields.items() if name != "json"), None
    text = caption(fields, config) if captioned else None
    data = image_bytes(fields, config.image_keys)
    if text is not None and _LONG.search(text):
        _refuse_long(text)
    facts = image_facts(data, pixel_range, bands)
    found = notes(open_picture(data)) if bands is None else []
    note_counts.update(found)
    if "mask.png" in fields and not captioned and bands is None:  # training on captions reads no masks
        _check_masks(fields, data, "rotated by EXIF" in found)
    return text, data, facts


def _check_masks(fields: Mapping[str, bytes], image: bytes, rotated: bool) -> None:
    """Raise `BadSampleError` if a mask does not have one number for each pixel of its image."""
    refuse_unclear_rotation(image)
    width, height = (ImageOps.exif_transpose(open_picture(image)) if rotated else open_picture(image)).size
    for name in ("mask.png", "semantic.png"):
        if name not in fields:
            continue
        try:
            shape = label_image(fields[name], f".{name}").shape
        except DataError as error:
            raise BadSampleError("bad mask", detail=str(error)) from None
        if shape != (height, width):
            detail = f"got {shape[1]} x {shape[0]} pixels, but the image has {width} x {height}"
            raise BadSampleError("a mask whose size differs from its image", detail=detail)


def _refuse_long(text: str) -> None:
    """Raise `BadSampleError` for captions that training refuses."""
    from sparo_train.data.examples.image_text import ClipTokenizer

    ClipTokenizer(_CONTEXT)(text)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") or 1


def _duplicates(shards: Sequence[ShardReport], storages: Sequence[Storage], name: str) -> Duplicates:
    parts = [getattr(shard, name) for shard in shards]
    joined, begins = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
    # Sorted hashes, so that no table of all keys is needed.
    values, counts = np.unique(joined[joined > 0], return_counts=True)
    examples = []
    for value in values[counts > 1][:_EXAMPLES]:
        where = np.flatnonzero(joined == value)[:_EXAMPLES]
        shard = np.searchsorted(begins, where, side="right") - 1
        examples.append(
            [(storages[s].url, storages[s].read(int(i - begins[s]))[0]) for s, i in zip(shard, where, strict=True)]
        )
    return Duplicates(int((counts - 1).sum()), examples)
