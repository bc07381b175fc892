"""The kind of a data set, from its files, for commands that are given a path instead of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...core.errors import ConfigError, DataError
from ...core.files import read_json
from ...core.registries import SOURCES
from ..decode.decoding import suffixes
from .base import SourceConfig, infer_kind

_MAX_INDEX_BYTES = 1 << 28
_MAX_ENTRIES = 1000  # files that are looked at in a folder


def source_block(places: Sequence[str]) -> dict[str, Any]:
    """Return the block of `data.sources` that reads these paths or URLs; whatever is not recognised is taken for shards.

    Raises:
        ConfigError: several places that one source cannot read together.
    """
    (kind, first), *others = (next(iter(_block(place).items())) for place in places)
    if not others:
        return {kind: first}
    if kind not in ("shards", "parquet") or any(other != kind for other, _ in others):
        kinds = ", ".join(f"{place} ({next(iter(_block(place)))})" for place in places[:4])
        raise ConfigError(
            f"{kinds}: cannot be combined. Give one data set, or several in the same format (shards or Parquet files)."
        )
    return {kind: (first, *(place for _, place in others))}


def _block(first: str) -> dict[str, str]:
    if first.endswith(".parquet"):
        return {"parquet": first}
    if first.lower().endswith((".csv", ".tsv")):
        return {"table": first}
    path = Path(first)
    if "://" not in first and (path / ".nv-meta").is_dir():  # before its shards, because some are for validation
        return {"energon": first}
    if "://" in first or not path.is_dir() or any(path.glob("*.tar")):
        return {"shards": first}
    if (path / "index.json").is_file():
        index = read_json(path / "index.json", dict, DataError, _MAX_INDEX_BYTES)
        return {"litdata": first} if "chunks" in index else {"mds": first}
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return {"dataset": first}
    for folder in (path, path / "data"):  # the second as on the hub
        if any(folder.glob("*.parquet")):
            return {"parquet": str(folder)}
    if _has_pictures(path):
        return {"folder": first}
    return {"shards": first}


def _has_pictures(folder: Path) -> bool:
    """Return whether a folder, or one of its first folders, has image files."""
    below = (entry for entry in sorted(folder.iterdir())[:_MAX_ENTRIES])
    for entry in below:
        files = [entry] if entry.is_file() else islice(entry.rglob("*"), _MAX_ENTRIES)
        if any(file.suffix.lower() in suffixes() and not file.name.startswith(".") for file in files):
            return True
    return False


def source_config(places: Sequence[str], **keys: Any) -> SourceConfig:
    """Return the config of a source at these paths or URLs.

    Args:
        places: one path or URL, or several files of one kind.
        keys: further keys of the block; those that are None are left at their default. `all_columns` is set only where there
            are columns.

    Raises:
        ConfigError: a key does not apply to this kind, or has a value that it refuses.
    """
    block = source_block(places)
    config = SOURCES.get(infer_kind(block)["kind"]).config
    for key, value in keys.items():
        if value is None or (key == "all_columns" and key not in config.model_fields):
            continue
        if key not in config.model_fields:
            raise ConfigError(
                f"{places[0]}: {key} does not apply to data of kind {next(iter(block))}, got {value!r}. Remove it."
            )
        block[key] = value
    try:
        return config(**block)  # without JSON, in which paths that are not UTF-8 cannot be written
    except ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        raise ConfigError("; ".join(problems)) from None
