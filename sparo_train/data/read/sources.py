"""The data of a recipe: weighted sources, each a storage of samples by number, and the fingerprint by which a resumed run recognises them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import field_validator

from ...core.config import Frozen, between, field, resumable_field
from ...core.errors import DataError
from ...core.registries import SOURCES
from ...core.registry import FromRegistry
from .decoding import PixelRange


class Storage(ABC):
    """A run of samples that are read by number: a shard, a part of an image folder. The plan treats it as a shard.

    `url`: what errors and counts call it.  `intact`: False where it breaks off or cannot be read.
    """

    url: str
    intact: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its members by extension.

        Raises:
            BadSampleError: this sample cannot be used; the message is the reason under which it is counted.
            DataError: the storage is not what it was.
        """

    def read_ahead(self, first: int, last: int) -> None:  # noqa: B027  a storage that cannot need not
        """Samples first..last-1 come soon."""

    def digest(self) -> str:
        """What the data's fingerprint depends on beside name and length."""
        return ""

    def sampled_hash(self) -> str:
        """What was looked at of the content on the way to the index, hashed; empty where nothing was."""
        return ""

    def content_hash(self) -> str | None:
        """Hash of all of it, where one was recorded; the fingerprint then holds it, too."""
        return None


class SourceConfig(Frozen):
    """What the block of every source has, whatever it is stored in (`sparo.sources`)."""

    kind: Any = field(..., "Entry of sparo.sources.")  # a Literal of one name, in each of them
    weight: float = field(1.0, "Passes over this source per epoch.", ge=0, le=1e6)
    image_keys: tuple[str, ...] = field(
        ("jpg", "jpeg", "png", "webp"), "File extensions of images. The first one that a sample has is used."
    )
    caption_key: str = field(
        "txt",
        "File extension of captions, or json:NAME for a field of the sample's JSON. From a list, each visit of the "
        "sample draws one caption.",
    )
    captions: dict[str, float] | None = field(
        None,
        "Several caption keys with their probabilities, instead of caption_key. Keys that a sample lacks pass their "
        "probability to the others.",
        min_length=1,
        examples=[{"txt": 0.5, "json:long": 0.5}],
    )
    has_captions: ClassVar[bool] = True

    @field_validator("captions")
    @classmethod
    def _shares(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not (all(0 <= share <= 1 for share in value.values()) and sum(value.values()) > 0):
            raise ValueError("probabilities must be between 0 and 1, and at least one above 0")
        if value is not None and abs(sum(value.values()) - 1) > 1e-3:
            raise ValueError(f"probabilities must add up to 1, got {sum(value.values()):g}")
        return value


class SourceKind(NamedTuple):
    """A row of `sparo.sources`. `open`: (config, its dotted key, whether indexes are written beside the data) to storages."""

    config: type[SourceConfig]
    open: Callable[[Any, str, bool], Sequence[Storage]]


def infer_kind(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """A block that names no kind is told by its `shards` or `folder`; resolved recipes of older versions have both, one of them null."""
    present_keys = [key for key in ("shards", "folder") if block.get(key) is not None]
    if len(present_keys) != 1:
        raise ValueError("set exactly one of shards and folder")
    return {
        "kind": present_keys[0],
        **{key: v for key, v in block.items() if v is not None or key not in ("shards", "folder")},
    }


PAIR_KEYS = ("crop_scale", "hflip", "trim_text")  # of `DataConfig`, read for image-text pairs alone


class DataConfig(Frozen):
    """What is read, in which order, and how it is treated."""

    sources: dict[str, Annotated[Any, FromRegistry(SOURCES, default=infer_kind)]] = field(
        ..., "Sources by name; each is an entry of sparo.sources.", min_length=1
    )
    workers: int = resumable_field(2, "Loader processes per rank. 0: load in the training process.", ge=0, le=256)
    prefetch: int = resumable_field(4, "Batches that each worker prepares ahead.", ge=1, le=1024)
    streams: int | None = field(
        None,
        "Number of streams of the data plan. Must divide batch_size. Default: 16 to 512, depending on batch_size.",
        gt=0,
    )
    chunk: int = field(
        64, "Consecutive samples of a shard that stay together before the shuffle window mixes them.", gt=0, le=1 << 31
    )
    shuffle_window: int = field(2048, "Samples of a stream that are shuffled together.", gt=0, le=1 << 31)
    crop_scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.9, 1.0), "Range of the share of the image area that a random crop covers."
    )
    hflip: float = field(0.0, "Probability of a horizontal flip.", ge=0, le=1)
    scaled_decoding: bool = field(
        False, "Let the JPEG decoder downscale by 2, 4 or 8 first. This is faster and changes pixel values."
    )
    pixel_range: PixelRange = field(
        "by_type",
        "Mapping of 16-bit, 32-bit and float pixels to 8 bits: by_type (the upper byte of 16 bits, floats from 0..1), "
        "[low, high], or percentiles (the 1st to the 99th of each image). 8-bit images are not changed.",
    )
    trim_text: bool = field(True, "Cut token ids after the longest caption of the batch. Exact under the causal mask.")
    max_bad_share: float = resumable_field(
        0.01, "Largest share of samples that may be unusable before the run stops.", ge=0, le=1
    )
    max_bad_share_min_samples: int = resumable_field(1000, "Samples read before max_bad_share applies.", ge=1)


class DamagedShard(NamedTuple):
    """A shard that breaks off or cannot be read, and about how many samples that loses (others of the source are whole)."""

    url: str
    reason: str
    lost_samples: int


class Source(NamedTuple):
    """A source with its storages found and indexed."""

    name: str
    config: SourceConfig
    storages: Sequence[Storage]

    @property
    def samples(self) -> int:
        return sum(map(len, self.storages))

    def broken(self) -> list[DamagedShard]:
        """Storages that are not whole. What they lost is estimated from the median of those that are; where none is, as much as is left."""
        # The median: one shard that is short by design does not make the others look damaged.
        whole = sorted(len(storage) for storage in self.storages if storage.intact)
        usual = whole[len(whole) // 2] if whole else 0
        return [
            DamagedShard(
                s.url, "truncated tar" if len(s) else "unreadable tar", max(1, usual - len(s) if whole else len(s))
            )
            for s in self.storages
            if not s.intact
        ]


def open_source(name: str, config: SourceConfig, write_index: bool = False, block: str = "data.sources") -> Source:
    """Find and index what a source holds; `block` is where a recipe names it, empty where none does. Raises `DataError` where there is no
    sample."""
    key = f"{block}.{name}" if block else name
    source = Source(name, config, SOURCES.get(config.kind).open(config, key, write_index))
    if not source.samples:
        first = source.storages[0].url if source.storages else config.kind
        why = "".join(f" ({damage.reason})" for damage in source.broken()[:1])
        raise DataError(f"{key}: {len(source.storages)} shard(s) without a complete sample; first: {first}{why}")
    return source


def fingerprint(sources: list[Source]) -> dict[str, Any]:
    """What a cursor belongs to: per source its shard names and counts, what was seen of their content, with readable totals.

    `sampled_hashes`: names, sizes, small members and a piece of large ones; where a file lies and when it was written is no part of it. A
    large member that differs elsewhere in the same length is not noticed, but by `content`: hashes of all of it, where every
    storage has one on record (`sparo data check --hash`).
    """
    out: dict[str, Any] = {}
    for source in sources:
        content_hashes = [s.content_hash() for s in source.storages]
        out[source.name] = {
            "shards": len(source.storages),
            "samples": source.samples,
            "weight": source.config.weight,
            # Names without their folder: data may be moved between two starts.
            "sha256": _hash(f"{Path(s.url).name} {len(s)} {s.digest()}".rstrip() for s in source.storages),
        }
        if any(sampled_hashes := [s.sampled_hash() for s in source.storages]):
            out[source.name]["seen"] = _hash(sampled_hashes)
        if all(content_hashes):
            out[source.name]["content"] = _hash(map(str, content_hashes))
    return out


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def refuse_changed(old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> None:
    """Raise `DataError` saying what changed between two fingerprints."""
    changed = []
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            # `seen` and `content` are compared where both have them: checkpoints of older versions, hashes recorded since
            both = [
                k for k in dict.fromkeys([*before, *now]) if k not in ("seen", "content") or (k in before and k in now)
            ]
            changed += [f"{key}.{k}: {before.get(k)} -> {now.get(k)}" for k in both if before.get(k) != now.get(k)]
        elif before != now:
            changed.append(f"{key}: {'absent' if before is None else before} -> {'absent' if now is None else now}")
    if changed:
        raise DataError(
            f"{where}: the data changed since this checkpoint, so its position in the data is invalid:\n  " + "\n  ".join(changed)
            + "\n(Names, sizes and samples of the content were compared.) Restore the data, or start another run with another name=."
        )  # fmt: skip
