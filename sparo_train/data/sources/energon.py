"""Webdatasets that `energon prepare` has indexed: shards by split in `.nv-meta/split.yaml`, offsets in `NAME.tar.idx`."""

from __future__ import annotations

from typing import Any, Literal

from ...core.config import field, resumable_field
from ...core.errors import DataError
from ...core.recipe.recipe_yaml import parse_yaml
from ..servers.ranges import read_range
from ..servers.remote import find_shards, open_filesystem, with_retries
from .base import SourceConfig, SourceKind, dotted_key
from .shards import Shard, open_shards

_MAX_BYTES = 1 << 26


class EnergonConfig(SourceConfig):
    """A folder with webdataset shards and Megatron Energon's `.nv-meta`."""

    kind: Literal["energon"] = field("energon", "Format of the data: an entry of sparo.sources.")
    energon: str = resumable_field(..., "Folder or fsspec URL that contains .nv-meta.", examples=["data/webdataset"])
    split: str = field("train", "Split in .nv-meta/split.yaml.")


def _open_energon(config: EnergonConfig, key: str, write_index: bool) -> list[Shard]:
    folder = config.energon.rstrip("/")
    file = f"{folder}/.nv-meta/split.yaml"
    filesystem, path = open_filesystem(file)
    if not with_retries(file, lambda: filesystem.exists(path)):
        raise DataError(
            f"{dotted_key(key, 'energon')}: {file} does not exist. Run `energon prepare {folder}`, or use shards instead of energon."
        )
    size = with_retries(file, lambda: filesystem.info(path)["size"]) or 0
    if size > _MAX_BYTES:
        raise DataError(f"{file}: expected at most {_MAX_BYTES} bytes, got {size}. Is it a list of shards?")
    content: Any = parse_yaml(read_range(file, 0, size).decode("utf-8", "replace"), file)
    splits = content.get("split_parts") if isinstance(content, dict) else None
    if not isinstance(splits, dict) or not isinstance(splits.get(config.split), list):
        names = ", ".join(map(str, splits)) if isinstance(splits, dict) else "none"
        raise DataError(
            f"{dotted_key(key, 'split')}: {file} has the splits {names}, got {config.split!r}. Name one of them."
        )
    shards, excluded = splits[config.split], content.get("exclude") or []
    if not all(
        isinstance(name, str) and ".." not in name.split("/") and "://" not in name for name in [*shards, *excluded]
    ):
        raise DataError(f"{file}: expected names of shards in this folder, got {str(shards)[:100]}.")
    urls = (
        find_shards(tuple(f"{folder}/{name.lstrip('/')}" for name in shards), dotted_key(key, "energon"))
        if shards
        else []
    )
    # Whole shards can be excluded; energon can also exclude single samples, as SHARD/KEY.
    if single := [name for name in excluded if not name.endswith(".tar")]:
        raise DataError(
            f"{file}: excludes single samples, such as {single[0]}, which sparo does not support. Exclude whole shards."
        )
    left_out = {url for name in excluded for url in find_shards(f"{folder}/{name}", dotted_key(key, "energon"))}
    return open_shards([url for url in urls if url not in left_out], write_index)


SOURCE = SourceKind(EnergonConfig, _open_energon)
