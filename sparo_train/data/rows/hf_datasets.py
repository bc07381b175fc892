"""Data sets of the Hugging Face library `datasets`: folders of `save_to_disk`, and names on the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...core.config import field, resumable_field
from ...core.errors import BadSampleError, ConfigError, DataError
from ..sources.base import SourceKind, Storage, dotted_key
from .columns import Columns, RowsConfig, choose_columns, row_members, split_column, warn_of_several_splits

_PART = 1000


class HfDatasetConfig(RowsConfig):
    """Images of a Hugging Face data set."""

    kind: Literal["datasets"] = field("datasets", "Format of the data: an entry of sparo.sources.")
    dataset: str = resumable_field(
        ...,
        "Folder written by Dataset.save_to_disk or DatasetDict.save_to_disk, or a name on the Hugging Face hub, as in nlphuji/flickr30k.",
        examples=["nlphuji/flickr30k"],
    )
    split: str = field(
        "train", "Split to read. If `dataset` is a name on the hub, a slice is possible, too, such as train[:10%]."
    )
    config_name: str | None = field(
        None, "Name of a configuration, for data sets on the hub with several configurations.", examples=["en"]
    )
    revision: str | None = field(None, "Commit or tag of a data set on the hub.", examples=["v1.0"])


class DatasetPart(Storage):
    """Some rows of a data set, which the plan treats as a shard."""

    def __init__(self, url: str, dataset: Any, begin: int, end: int, columns: Columns, digest: str):
        self.url, self._dataset, self._begin, self._end = url, dataset, begin, end
        self._columns, self._digest = columns, digest

    def __len__(self) -> int:
        return self._end - self._begin

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        row = self._dataset[self._begin + number]
        try:
            return f"{self._begin + number:09d}", row_members(self._columns, row, Path())
        except BadSampleError as bad:
            bad.key = f"row {self._begin + number}"
            raise

    def digest(self) -> str:
        return self._digest


def _load(config: HfDatasetConfig, key: str) -> Any:
    """Return the split. Raises `DataError` if it does not exist or cannot be read."""
    import datasets

    try:
        if not Path(config.dataset).exists():
            return datasets.load_dataset(
                config.dataset, config.config_name, split=config.split, revision=config.revision
            )
        found = datasets.load_from_disk(config.dataset)
    except Exception as error:  # the library raises errors of many others
        first = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DataError(
            f"{dotted_key(key, 'dataset')}: {config.dataset}, split {config.split!r}, cannot be loaded ({first}). Give a folder that save_to_disk wrote, "
            "or a name on the hub that load_dataset can load on this machine."
        ) from None
    if isinstance(found, Mapping):
        if config.split not in found:
            raise DataError(
                f"{dotted_key(key, 'split')}: {config.dataset} has no split {config.split!r}. Name one of its splits: {', '.join(map(str, found))}."
            )
        return found[config.split]
    if config.split != "train":
        raise DataError(
            f"{dotted_key(key, 'split')}: {config.dataset} is one data set without splits, got {config.split!r}. Remove the key `split`."
        )
    return found


def _open_dataset(config: HfDatasetConfig, key: str, _write_index: bool) -> list[DatasetPart]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{key or 'datasets'}: data sets of Hugging Face need the package `datasets`. pip install -e "
            "'.[datasets]' in sparo's checkout"
        ) from None
    dataset = _load(config, key)
    columns = choose_columns(dataset.column_names, config, f"{dotted_key(key, 'dataset')}: {config.dataset}")
    if split := split_column(dataset.column_names):
        few = dataset.select_columns(split)[:: max(1, len(dataset) // 1000)]
        warn_of_several_splits(f"{dotted_key(key, 'dataset')}: {config.dataset}", split, few[split])
    digest = hashlib.sha256(f"{dataset._fingerprint} {dataset.features}".encode()).hexdigest()[:16]
    for name, feature in dataset.features.items():
        # Encoded bytes instead of pictures: sparo decodes them itself.
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    dataset = dataset.select_columns(list(dict.fromkeys([columns.image, *columns.others.values()]))).with_format(None)
    return [
        DatasetPart(
            f"{config.dataset}#{begin // _PART}", dataset, begin, min(begin + _PART, len(dataset)), columns, digest
        )
        for begin in range(0, len(dataset), _PART)
    ]


SOURCE = SourceKind(HfDatasetConfig, _open_dataset)
