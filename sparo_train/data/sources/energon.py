"""Webdatasets that `energon prepare` has indexed: shards by split in `.nv-meta/split.yaml`, offsets in `NAME.tar.idx`."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Literal

from ...core.config import field, resumable_field
from ...core.errors import DataError, SparoError
from ...core.logs import warn_once
from ...core.recipe.recipe_yaml import parse_yaml
from ..servers.ranges import read_range
from ..servers.remote import find_shards, open_filesystem, with_retries
from .base import SourceConfig, SourceKind, dotted_key
from .shards import Shard, open_shards

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 26


class EnergonConfig(SourceConfig):
    """A folder with webdataset shards and Megatron Energon's `.nv-meta`."""

    kind: Literal["energon"] = field("energon", "Format of the data: an entry of sparo.sources.")
    energon: str = resumable_field(..., "Folder or fsspec URL that contains .nv-meta.", examples=["data/webdataset"])
    split: str = field("train", "Split in .nv-meta/split.yaml.")


def _read_yaml(file: str) -> Any:
    """Return the content of a file in .nv-meta; None if it does not exist."""
    filesystem, path = open_filesystem(file)
    if not with_retries(file, lambda: filesystem.exists(path)):
        return None
    size = with_retries(file, lambda: filesystem.info(path)["size"]) or 0
    if size > _MAX_BYTES:
        raise DataError(f"{file}: expected at most {_MAX_BYTES} bytes, got {size}. Is it a list of shards?")
    return parse_yaml(read_range(file, 0, size).decode("utf-8", "replace"), file) or {}


def _warn_of_field_map(folder: str, config: EnergonConfig, key: str) -> None:
    """Warn if the data set names its captions in `dataset.yaml`, which this reader does not use."""
    content = None
    with suppress(SparoError):  # nothing else is read from this file
        content = _read_yaml(f"{folder}/.nv-meta/dataset.yaml")
    fields = content.get("field_map") if isinstance(content, dict) else None
    caption = fields.get("caption") if isinstance(fields, dict) else None
    if isinstance(caption, str) and config.caption_key == "txt" and config.captions is None and caption != "txt":
        warn_once(
            logger,
            f"{dotted_key(key, 'energon')}: the field_map of {folder}/.nv-meta/dataset.yaml is not used, got caption: {caption}. For captions "
            "in JSON, set caption_key, such as json:caption.",
        )


def _open_energon(config: EnergonConfig, key: str, write_index: bool) -> list[Shard]:
    folder = config.energon.rstrip("/")
    file = f"{folder}/.nv-meta/split.yaml"
    content = _read_yaml(file)
    if content is None:
        raise DataError(
            f"{dotted_key(key, 'energon')}: {file} does not exist. Run `energon prepare {folder}`, or use shards instead of energon."
        )
    _warn_of_field_map(folder, config, key)
    splits = content.get("split_parts") if isinstance(content, dict) else None
    if not isinstance(splits, dict) or not isinstance(splits.get(config.split), list):
        names = ", ".join(map(str, splits)) if isinstance(splits, dict) else "none"
        raise DataError(
            f"{dotted_key(key, 'split')}: {file} has no split {config.split!r}. Name one of its splits: {names}."
        )
    shards, excluded = splits[config.split], content.get("exclude") or []
    if not all(
        isinstance(name, str) and ".." not in name.split("/") and "://" not in name for name in [*shards, *excluded]
    ):
        raise DataError(f"{file}: expected names of shards in {folder}, got {str(shards)[:100]}.")
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
