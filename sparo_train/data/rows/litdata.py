"""Lightning's LitData, without compression and encryption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ...core.config import field, resumable_field
from ...core.errors import ConfigError, DataError
from ..servers.ranges import read_range
from ..servers.remote import get_file_size
from ..sources.base import SourceKind, dotted_key
from .columns import RowsConfig, choose_sampled
from .groups import Group, process_groups
from .packed import (
    Decode,
    PackedField,
    PackedFile,
    decode_picture,
    decode_text,
    file_below,
    index_entries,
    number_decoder,
    open_packed,
    read_index,
    refuse_compression,
    set_stamps,
)


class LitDataConfig(RowsConfig):
    """A data set of LitData (litdata.optimize), without compression and encryption."""

    kind: Literal["litdata"] = field("litdata", "Format of the data: an entry of sparo.sources.")
    litdata: str = resumable_field(
        ..., "Folder or fsspec URL with index.json, as written by litdata.optimize.", examples=["data/litdata"]
    )


_DECODERS: dict[str, Decode] = {
    "bytes": bytes,
    "jpeg": bytes,
    "image": bytes,
    "pil": decode_picture,
    "str": decode_text,
    "text": decode_text,
    "int": number_decoder("<i8"),
    "float": number_decoder("<f8"),
    "json": json.loads,
    "bool": lambda data: bool(data[0]),
}
_FOOTER = b"LDARW01\0"


class LitDataFile(PackedFile, Group):
    """A file of LitData. If all samples are dictionaries of plain values, their table is empty, and an Arrow file follows it.

    The layout is then: offsets that are all equal, the Arrow file, its length (uint32), and `LDARW01`.
    """

    decoders = _DECODERS

    def row(self, number: int) -> bytes | Mapping[str, Any]:
        return process_groups().row(self, number) if self.is_arrow else super().row(number)

    def row_sample(self) -> str:
        # An Arrow table can only be read as a whole, which takes too long at the start of every rank.
        return "" if not self.is_sampled or self.is_arrow else super().row_sample()

    def read_ahead(self, first: int, last: int) -> None:
        if self.is_arrow:
            process_groups().announce(self, first, last)
        else:
            super().read_ahead(first, last)

    @property
    def is_arrow(self) -> bool:
        return bool(self.offsets[0] == self.offsets[-1])

    @property
    def row_bytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return -(-self._size // max(1, len(self)))

    def table(self) -> Any:
        try:
            import pyarrow as pa
        except ImportError:
            raise ConfigError(f"{self.url}: needs pyarrow. pip install -e '.[litdata]' in sparo's checkout") from None
        data = Path(self.url).read_bytes() if "://" not in self.url else read_range(self.url, 0, self._size)
        length = int.from_bytes(data[-12:-8], "little")
        begin = len(data) - 12 - length
        if data[-8:] != _FOOTER or begin < 0:
            raise DataError(
                f"{self.url}: contains neither samples of LitData nor an Arrow table. Copy the data set again."
            )
        try:
            found = pa.ipc.open_file(pa.py_buffer(data).slice(begin, length)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.url}: its table is damaged ({error}). Copy the data set again.") from None
        if lacking := self._wanted - set(found.column_names):
            raise DataError(
                f"{self.url}: its Arrow table has the columns {', '.join(found.column_names)} and lacks {', '.join(sorted(lacking))}. "
                "Nested samples are not supported: write a flat dictionary of image and captions."
            )
        if len(found) != len(self):
            raise DataError(f"{self.url}: its Arrow table does not match index.json. Copy the data set again.")
        return found.select(sorted(self._wanted))


def _open_litdata(config: LitDataConfig, key: str, _write_index: bool) -> list[LitDataFile]:
    """Return the files of a LitData data set, as `index.json` lists them."""
    index = read_index(config.litdata, dotted_key(key, "litdata"), "litdata.optimize")
    settings = index.get("config")
    if not isinstance(settings, dict):
        raise DataError(
            f"{config.litdata}/index.json: has no block `config`, so litdata.optimize did not write it. Check the format of the data set."
        )
    if settings.get("item_loader") not in (None, "PyTreeLoader"):
        raise DataError(
            f"{config.litdata}/index.json: expected samples that are Python objects, got "
            f"item_loader={settings.get('item_loader')}. Write the data set again with litdata.optimize and the "
            "default item_loader."
        )
    refuse_compression(config.litdata, settings.get("compression"), "litdata.optimize")
    if settings.get("encryption"):
        raise DataError(f"{config.litdata}: is encrypted. Write the data set again without encryption.")
    kinds = [str(kind).partition(":")[0] for kind in settings.get("data_format") or ()]
    fields = [PackedField(name, kind) for name, kind in zip(_leaf_names(settings, len(kinds)), kinds, strict=True)]
    chunks = index_entries(index, "chunks", config.litdata)
    urls = [file_below(config.litdata, chunk.get("filename")) for chunk in chunks]
    # Not `chunk_bytes` of the index, which contains the table of offsets in some versions only.
    with ThreadPoolExecutor(32) as pool:
        sizes = list(pool.map(get_file_size, urls))
    files = [
        open_packed(LitDataFile, url, chunk.get("chunk_size"), size, fields, config, chunk)
        for url, chunk, size in zip(urls, chunks, sizes, strict=True)
    ]
    choose_sampled(files)
    set_stamps(files, config.litdata)
    # All files of a set are alike, and looking into each would take a request per file.
    is_group = bool(files) and files[0].is_arrow
    for file in files:
        file.is_group = is_group
    return files


def _leaf_names(settings: Mapping[str, Any], count: int) -> list[str]:
    """Return a name for each value of a sample: the keys of a dictionary, otherwise positions."""
    with suppress(ValueError, TypeError, KeyError, IndexError):
        spec = json.loads(settings["data_spec"])[1]
        names = json.loads(spec["context"]) if spec["type"] == "builtins.dict" else []
        if len(names) == count and all(child["type"] is None for child in spec["children_spec"]):
            return list(map(str, names))
    return [str(i) for i in range(count)]


SOURCE = SourceKind(LitDataConfig, _open_litdata)
