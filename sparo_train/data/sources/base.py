"""The data of a recipe: weighted sources, and their storages of numbered samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import field_validator, model_validator

from ...core.config import Frozen, between, field, resumable_field
from ...core.errors import DataError, did_you_mean
from ...core.registries import SOURCES
from ...core.registry import FromRegistry
from ..decode.bands import Bands, PixelRange, check_bands
from ..servers.cache import CacheConfig
from ..servers.remote import refuse_credentials


class Storage(ABC):
    """Storage of numbered samples: a shard, or a part of an image folder, which the plan treats as a shard.

    Attributes:
        url: name for errors and counts.
        intact: False if it is truncated or cannot be read.
        is_group: whether one sample cannot be read without decoding all of them.
    """

    url: str
    intact: bool = True
    is_group: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Return the key of a sample, and its members by extension.

        Raises:
            BadSampleError: this sample cannot be used; the message is the reason under which it is counted.
            DataError: the storage has changed.
        """

    def read_ahead(self, first: int, last: int) -> None:  # noqa: B027  a storage that cannot need not
        """Announce that samples first..last-1 will be read soon."""

    def digest(self) -> str:
        """Return the bytes that the data's fingerprint uses in addition to name and length."""
        return ""

    def row_sample(self) -> str:
        """Return a hash of some rows for the data's fingerprint; empty if none were read."""
        return ""

    def sampled_hash(self) -> str:
        """Return a hash of the content that indexing read; empty if it read none."""
        return ""

    def content_hash(self) -> str | None:
        """Return a hash of the whole content if one is recorded, which the fingerprint then includes."""
        return None


_closers: list[Callable[[], None]] = []


def on_close(close: Callable[[], None]) -> Callable[[], None]:
    """Register a function that closes the open files of this process's storages of one kind; later reads open them again."""
    _closers.append(close)
    return close


def close_storages() -> None:
    """Close the open files of all storages that this process has read from."""
    for close in _closers:
        close()


class SourceConfig(Frozen):
    """Keys of every source block, whatever its kind (`sparo.sources`)."""

    kind: Any = field(..., "Format of the data: an entry of sparo.sources.")  # each entry has a Literal with one name
    weight: float = field(
        1.0,
        "Number of passes over this source per epoch. If `shards` is a list A::B, one number per part can also be given, as in 1::2.",
        ge=0,
        le=1e6,
    )
    image_keys: tuple[str, ...] = field(
        ("jpg", "jpeg", "png", "webp"),
        "File extensions of images. If a sample has several images, the order of this list is the order of preference.",
    )
    caption_key: str = field(
        "txt",
        "File extension of captions, or json:NAME for a field of the sample's JSON. If the field is a list "
        "of captions, one is sampled each time the sample is read.",
    )
    captions: dict[str, float] | None = field(
        None,
        "Several caption keys with their probabilities, instead of caption_key. If a sample lacks some of these keys, their probability goes to the others.",
        min_length=1,
        examples=[{"txt": 0.5, "json:long": 0.5}],
    )
    has_captions: ClassVar[bool] = True

    def caption_member(self, key: str) -> tuple[str, str]:
        """Return the member of a sample that a caption key names, and the field in its JSON, or an empty string."""
        member, _, name = key.partition(":")
        return member, name

    @model_validator(mode="after")
    def _refuse_credentials(self) -> SourceConfig:
        refuse_credentials(*vars(self).values())
        return self

    @field_validator("captions")
    @classmethod
    def _shares(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not (all(0 <= share <= 1 for share in value.values()) and sum(value.values()) > 0):
            raise ValueError("probabilities must be between 0 and 1, and at least one of them must be above 0")
        if value is not None and abs(sum(value.values()) - 1) > 1e-3:
            raise ValueError(f"probabilities must add up to 1, got {sum(value.values()):g}")
        return value


class SourceKind(NamedTuple):
    """Entry of `sparo.sources`. `open` maps (config, its dotted key, whether to write indexes next to the data) to storages."""

    config: type[SourceConfig]
    open: Callable[[Any, str, bool], Sequence[Storage]]


# The key that locates the data of each kind, which is unique among kinds.
_LOCATIONS = {
    "shards": "shards", "folder": "folder", "parquet": "parquet", "dataset": "datasets", "mds": "mds", "litdata": "litdata",
    "energon": "energon", "table": "table",
}  # fmt: skip


def infer_kind(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Infer the kind of a block from the key that locates its data; resolved recipes of older versions have two, one of them null."""
    present_keys = [key for key in _LOCATIONS if block.get(key) is not None]
    unknown = [key for key in block if key not in SourceConfig.model_fields]
    if not present_keys and unknown:
        raise ValueError(
            f"expected a key that locates the data, got {', '.join(map(str, unknown))}; {did_you_mean(str(unknown[0]), _LOCATIONS)}"
        )
    if len(present_keys) != 1:
        raise ValueError(
            f"set exactly one of {', '.join(_LOCATIONS)}, got {' and '.join(present_keys) or 'none of them'}"
        )
    given = {key: v for key, v in block.items() if v is not None or key not in ("shards", "folder")}
    return {"kind": _LOCATIONS[present_keys[0]], **given}


class DataConfig(Frozen):
    """Sources, order and treatment of the data."""

    sources: dict[str, Annotated[Any, FromRegistry(SOURCES, default=infer_kind)]] = field(
        ..., "Sources by name; each is an entry of sparo.sources.", min_length=1
    )
    workers: int = resumable_field(2, "Loader processes per rank. 0: load in the training process.", ge=0, le=256)
    prefetch: int = resumable_field(4, "Batches that each worker prepares ahead.", ge=1, le=1024)
    streams: int | None = field(
        None,
        "Number of streams into which the samples of an epoch are divided. Must divide batch_size. If all ranks together have more loader workers "
        "than there are streams, several workers take turns with the samples of a stream. Default: 16 to 512, depending on batch_size.",
        gt=0,
    )
    chunk: int = field(
        64,
        "Number of consecutive samples of a shard that are read together; they are then shuffled with other samples (see data.shuffle_window).",
        gt=0,
        le=1 << 31,
    )
    whole_groups: bool = resumable_field(
        True,
        "For data that is decoded in groups (row groups of Parquet, Arrow files of LitData): read a whole group at "
        "a time (at most data.shuffle_window samples) instead of `data.chunk` samples at a time. Set "
        "data.whole_groups to false to resume a run that was started before this key existed.",
    )
    shuffle_window: int = field(2048, "Samples of a stream that are shuffled together.", gt=0, le=1 << 31)
    cache: CacheConfig | None = resumable_field(
        None, "Cache on each node's disk for samples that are read from servers. Default: none."
    )
    crop_scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.9, 1.0), "Smallest and largest area of a random crop, as a share of the image area."
    )
    hflip: float = field(0.0, "Probability of a horizontal flip.", ge=0, le=1)
    decode: Literal["fast", "exact"] = field(
        "fast",
        "Library that resizes images. fast: torch. exact: Pillow, as in evaluation and in open_clip. The resized "
        "pixels differ by at most two of 256 levels.",
    )
    scaled_decoding: bool = field(
        False,
        "Let the JPEG decoder downscale first, to at least twice image_size. This is faster and changes pixel values.",
    )
    pixel_range: PixelRange = field(
        "by_type",
        "How 16-bit, 32-bit and float pixels are mapped to 8 bits: by_type (the upper byte of 16-bit values; floats are taken to be in 0..1), "
        "[low, high] (mapped to 0..255), a list of one such pair per band, or percentiles (the 1st to the 99th of each image). 8-bit images are not changed.",
    )
    bands: Bands | None = field(
        None,
        "Bands to read from each image, for example from a multispectral TIFF. Band numbers start at 1. "
        "objective.model.bands must equal the number of bands in this list. Default: red, green and blue.",
        examples=[[1, 2, 3, 4]],
    )
    trim_text: bool = field(
        True,
        "Cut the padding after the longest caption of a batch. With a causal mask, this does not change encodings.",
    )
    max_bad_share: float = resumable_field(
        0.01, "Largest share of samples that may be unusable before the run stops.", ge=0, le=1
    )
    max_bad_share_min_samples: int = resumable_field(
        1000, "Number of samples that must be read before max_bad_share applies.", ge=1
    )

    @model_validator(mode="after")
    def _check_bands(self) -> DataConfig:
        check_bands(self.bands, self.pixel_range, self.decode, self.scaled_decoding)
        return self

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: Any) -> Any:
        """Make a source of each part of `shards: A::B` with `weight: 1::2`, as open_clip's lists with upsampling factors."""
        if not isinstance(values, Mapping) or not isinstance(values.get("sources"), Mapping):
            return values
        sources: dict[str, Any] = {}
        for name, block in values["sources"].items():
            weight = block.get("weight") if isinstance(block, Mapping) else None
            if not isinstance(weight, str) or "::" not in weight:
                sources[name] = block
                continue
            if not isinstance(block.get("shards"), str):
                raise ValueError(
                    f"sources.{name}.weight: several weights need several lists of shards (`shards: A::B`), got {weight}"
                )
            parts, weights = block["shards"].split("::"), list(map(_number, weight.split("::")))
            if len(parts) != len(weights):
                raise ValueError(f"sources.{name}.weight: {len(weights)} weights for {len(parts)} lists of shards")
            for i, pair in enumerate(zip(parts, weights, strict=True)):
                if f"{name}_{i}" in values["sources"]:
                    raise ValueError(
                        f"sources.{name}_{i}: part {i} of sources.{name} would also get this name. Rename one of the two sources."
                    )
                sources[f"{name}_{i}"] = {**block, "shards": pair[0], "weight": pair[1]}
        return {**values, "sources": sources}


def _number(text: str) -> Any:
    """Return the number that a text is; the text itself, which a later check refuses, if it is none."""
    try:
        return float(text)
    except ValueError:
        return text


class DamagedShard(NamedTuple):
    """A shard that is truncated or cannot be read, and an estimate of the lost samples."""

    url: str
    reason: str
    lost_samples: int


class Source(NamedTuple):
    """A source with its indexed storages."""

    name: str
    config: SourceConfig
    storages: Sequence[Storage]

    @property
    def samples(self) -> int:
        return sum(map(len, self.storages))

    def incomplete_storages(self) -> list[DamagedShard]:
        """Return incomplete storages. Losses are estimated from the median size of complete ones; without any, as much as is left."""
        # The median, so that one shard that is short by design does not make the others look damaged.
        whole = sorted(len(storage) for storage in self.storages if storage.intact)
        usual = whole[len(whole) // 2] if whole else 0
        return [
            DamagedShard(
                s.url, "truncated tar" if len(s) else "unreadable tar", max(1, usual - len(s) if whole else len(s))
            )
            for s in self.storages
            if not s.intact
        ]


def dotted_key(key: str, name: str) -> str:
    """Return the dotted key of a source's own key, for errors; without a recipe, the name alone."""
    return f"{key}.{name}" if key else name


def open_source(name: str, config: SourceConfig, write_index: bool = False, block: str = "data.sources") -> Source:
    """Find and index the storages of a source.

    Args:
        name, config: the source.
        write_index: store indexes next to the data.
        block: dotted key of the source in a recipe, or empty.

    Raises:
        DataError: it has no sample.
    """
    key = f"{block}.{name}" if block else name
    source = Source(name, config, SOURCES.get(config.kind).open(config, key, write_index))
    if not source.samples:
        first = source.storages[0].url if source.storages else config.kind
        why = "".join(f" ({damage.reason})" for damage in source.incomplete_storages()[:1])
        count = len(source.storages)
        raise DataError(f"{key or config.kind}: {count} shard(s) without a complete sample; first: {first}{why}")
    return source
