"""MosaicML Streaming's MDS, without compression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from ...core.config import field, resumable_field
from ...core.errors import DataError
from ..sources.base import SourceKind, dotted_key
from .columns import RowsConfig, choose_sampled
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


class MdsConfig(RowsConfig):
    """A data set of MosaicML Streaming (MDS), without compression."""

    kind: Literal["mds"] = field("mds", "Format of the data: an entry of sparo.sources.")
    mds: str = resumable_field(
        ..., "Folder or fsspec URL with index.json, as written by streaming.MDSWriter.", examples=["data/mds"]
    )


_DECODERS: dict[str, Decode] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "pil": decode_picture,
    "str": decode_text,
    "json": json.loads,
    "int": number_decoder("<i8"),
    **{f"str_{kind}": decode_text for kind in ("int", "float", "decimal")},
    **{
        f"{kind}{bits}": number_decoder(f"<{kind[0]}{bits // 8}")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": number_decoder(f"<f{bits // 8}") for bits in (16, 32, 64)},
}


class MdsFile(PackedFile):
    """A file of MDS."""

    decoders = _DECODERS


def _open_mds(config: MdsConfig, key: str, _write_index: bool) -> list[MdsFile]:
    """Return the files of an MDS data set, as `index.json` lists them."""
    index = read_index(config.mds, dotted_key(key, "mds"), "streaming.MDSWriter")
    files = []
    for shard in index_entries(index, "shards", config.mds):
        raw = shard.get("raw_data")
        if shard.get("format") != "mds" or shard.get("version") != 2 or not isinstance(raw, dict):
            raise DataError(
                f"{config.mds}/index.json: expected MDS version 2, got {shard.get('format')} {shard.get('version')}."
            )
        url = file_below(config.mds, raw.get("basename"))
        if "://" in url or not Path(url).is_file():  # streaming may keep decompressed files next to compressed ones
            refuse_compression(url, shard.get("compression"), "streaming.MDSWriter")
        if "://" not in url and (not Path(url).is_file() or Path(url).stat().st_size != raw.get("bytes")):
            found = f"{Path(url).stat().st_size} bytes" if Path(url).is_file() else "no file"
            raise DataError(
                f"{url}: expected {raw.get('bytes')} bytes according to index.json, got {found}. Copy the data set again."
            )
        try:
            fields = [
                PackedField(str(name), encoding.partition(":")[0], int(size) if size else None)
                for name, encoding, size in zip(
                    shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True
                )
            ]
        except (KeyError, ValueError, TypeError, AttributeError):
            raise DataError(
                f"{config.mds}/index.json: the columns of {url} are not described. Copy the data set again."
            ) from None
        files.append(open_packed(MdsFile, url, shard.get("samples"), raw.get("bytes"), fields, config, shard))
    choose_sampled(files)
    set_stamps(files, config.mds)
    return files


SOURCE = SourceKind(MdsConfig, _open_mds)
