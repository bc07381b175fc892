"""Which shards a recipe means: folders, globs, brace ranges and fsspec URLs, several sources with weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, model_validator
from webdataset.shardlists import expand_urls

from ..core.config import Frozen
from ..core.errors import ConfigError, DataError, did_you_mean
from .folder import FolderPart, open_folder
from .shards import ShardIndex, ShardReader, filesystem_of, load_index


class SourceConfig(Frozen):
    """One data set: `shards`, or a `folder` of images.

    `shards`: a folder, a glob, a brace range (`cc3m/{00000..00331}.tar`), an fsspec URL (`s3://bucket/{000..999}.tar`), or a list of these.
    `folder`: images in class folders or not (`imagenet/train`); for objectives that read no captions.
    `weight`: passes over it per epoch.
    """

    shards: str | tuple[str, ...] | None = None
    folder: str | None = None
    weight: float = Field(default=1.0, ge=0)
    image_keys: tuple[str, ...] = ("jpg", "jpeg", "png", "webp")
    caption_key: str = "txt"

    @model_validator(mode="after")
    def _one_place(self) -> SourceConfig:
        if (self.shards is None) == (self.folder is None):
            raise ValueError("give shards or folder, one of them")
        return self


PAIR_KEYS = ("crop_scale", "hflip", "trim_text")  # of `DataConfig`, read for image-text pairs alone


class DataConfig(Frozen):
    """What is read, in which order, and how it is treated."""

    sources: dict[str, SourceConfig] = Field(min_length=1)
    workers: int = Field(default=2, ge=0)
    prefetch: int = Field(default=4, ge=1)  # batches each worker prepares ahead
    streams: int | None = Field(
        default=None, gt=0
    )  # C of the plan; must divide the batch; default: 16 to 512, with the batch
    chunk: int = Field(default=64, gt=0)
    window: int = Field(default=2048, gt=0)
    crop_scale: tuple[float, float] = (0.9, 1.0)
    hflip: float = Field(default=0.0, ge=0, le=1)
    scaled_decoding: bool = False  # let the JPEG decoder shrink by 2, 4, 8 first: faster, pixels differ
    trim_text: bool = True  # cut a batch's token ids behind its longest caption: exact under the causal mask
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
    max_bad_share_after: int = Field(default=1000, ge=1)  # samples tried before the share is judged


class Damage(NamedTuple):
    """A shard that breaks off or cannot be read, and about how many samples that loses (others of the source are whole)."""

    url: str
    reason: str
    lost: int


class Source(NamedTuple):
    """A source with its shards found and indexed."""

    name: str
    config: SourceConfig
    urls: list[str]
    indexes: list[ShardIndex] | list[FolderPart]

    def read(self, reader: ShardReader, shard: int, ordinal: int) -> tuple[str, dict[str, bytes]]:
        """Key and fields of a sample; raises what `ShardReader.read` raises."""
        index = self.indexes[shard]
        return index.read(ordinal) if isinstance(index, FolderPart) else reader.read(self.urls[shard], ordinal)

    def read_ahead(self, reader: ShardReader, shard: int, first: int, last: int) -> None:
        """Tell the system that samples first..last-1 of a shard come soon."""
        if not isinstance(self.indexes[shard], FolderPart):
            reader.read_ahead(self.urls[shard], first, last)

    @property
    def samples(self) -> int:
        return sum(map(len, self.indexes))

    def broken(self) -> list[Damage]:
        """Shards that are not whole. What they lost is estimated from the median of those that are."""
        whole = sorted(len(index) for index in self.indexes if index.intact)
        usual = whole[len(whole) // 2] if whole else 0
        return [
            Damage(url, "truncated tar" if len(index) else "unreadable tar", max(1, usual - len(index)))
            for url, index in zip(self.urls, self.indexes, strict=True)
            if not index.intact
        ]


def find_shards(pattern: str | tuple[str, ...], key: str = "shards") -> list[str]:
    """Expand a `shards` value to a sorted list of paths and URLs.

    Raises:
        ConfigError: a `pipe:` command, or a pattern that matches nothing; `key` is named.
    """
    found: list[str] = []
    for part in (pattern,) if isinstance(pattern, str) else pattern:
        if part.startswith("pipe:"):
            raise ConfigError(
                f"{key}: {part!r} runs a shell command and cannot be read by position; use an fsspec URL (s3://, gs://, https://)"
            )
        try:
            urls = expand_urls(part)
        except ValueError:  # braceexpand's
            raise ConfigError(f"{key}: {part!r} has a brace without its partner; write {{00000..00331}}") from None
        for url in urls:
            found += _expand(url, key)
    if not found:
        raise ConfigError(f"{key}: an empty list; name at least one folder, glob, brace range or URL")
    return list(dict.fromkeys(found))


def open_source(name: str, config: SourceConfig, write_beside: bool = False, block: str = "data.sources") -> Source:
    """Find and index the shards of a source (16 at a time), or the images of its folder; `block` is where the recipe names it."""
    key = f"{block}.{name}"
    if config.folder is not None:
        parts = open_folder(config.folder, f"{key}.folder")
        return Source(name, config, [f"{config.folder}#{i}" for i in range(len(parts))], parts)
    assert config.shards is not None
    urls = find_shards(config.shards, f"{key}.shards")
    with ThreadPoolExecutor(16) as pool:
        indexes = list(pool.map(lambda url: load_index(url, write_beside), urls))
    source = Source(name, config, urls, indexes)
    if not source.samples:
        why = "".join(f" ({damage.reason})" for damage in source.broken()[:1])
        raise DataError(f"{key}: {len(urls)} shard(s), not one whole sample in them; first: {urls[0]}{why}")
    return source


def fingerprint(sources: list[Source]) -> dict[str, Any]:
    """What a cursor belongs to: per source its shard names and counts, hashed, with readable totals."""
    out = {}
    for source in sources:
        lines = [
            f"{Path(url).name} {len(index)}" + (f" {index.digest()}" if isinstance(index, FolderPart) else "")
            for url, index in zip(source.urls, source.indexes, strict=True)
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        out[source.name] = {
            "shards": len(lines),
            "samples": source.samples,
            "weight": source.config.weight,
            "sha256": digest,
        }
    return out


def refuse_changed(old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> None:
    """Raise `DataError` saying what changed between two fingerprints."""
    changed = [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise DataError(
            f"{where}: the data set changed since this checkpoint, its cursor no longer fits:\n  " + "\n  ".join(changed)
            + "\nRestore the shards, or start another run under another name=."
        )  # fmt: skip


def _expand(url: str, key: str) -> list[str]:
    filesystem, path = filesystem_of(url)
    protocol = url.split("://", 1)[0] + "://" if "://" in url else ""
    if any(c in path for c in "*?["):
        hits = sorted(filesystem.glob(path))
    elif filesystem.isdir(path):
        hits = sorted(filesystem.glob(path.rstrip("/") + "/*.tar"))
    elif filesystem.exists(path):
        return [url]
    else:
        hits = []
    if not hits:
        raise ConfigError(f"{key}: {url!r} matches no shard; {_nearest(url)}")
    return [protocol + str(hit) if protocol else _as_given(url, str(hit)) for hit in hits]


def _as_given(url: str, hit: str) -> str:
    """fsspec answers with absolute paths; keep relative ones relative, so that a run folder can move with its data."""
    if Path(url).is_absolute():
        return hit
    try:
        return str(Path(hit).relative_to(Path.cwd()))
    except ValueError:
        return hit


def _nearest(url: str) -> str:
    folder = Path(url).parent
    if "://" in url or not folder.is_dir():
        return f"{folder} is no folder" if "://" not in url else "check the address and your credentials"
    return did_you_mean(Path(url).name, [p.name for p in folder.iterdir()][:200])
