"""Writers of MosaicML's MDS and Lightning's LitData.

MDS's library needs versions of other packages that this project does not support. Both formats have the same outline,
which sparo_train/data/rows/packed.py describes, so LitData needs no library either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash

from sparo_train.core.files import write_whole

_FILE_BYTES = 1 << 26  # both libraries' default; offsets have 32 bits
_MDS_ENCODINGS = {str: "str", bytes: "bytes"}
_HASH = "xxh64"

Fields = Mapping[str, "str | bytes"]


def write_mds(out: Path, rows: Iterable[Fields], per_file: int) -> None:
    """Write MDS version 2 without compression: `shard.00000.mds` …, and `index.json` at the end.

    Args:
        out: folder, created if necessary.
        rows: samples, all with the same columns of text and bytes.
        per_file: largest number of samples per file.
    """
    shards = []
    for number, block in enumerate(_blocks(rows, per_file)):
        names = sorted(block[0])
        columns = {
            "column_encodings": [_MDS_ENCODINGS[type(block[0][name])] for name in names],
            "column_names": names,
            "column_sizes": [None] * len(names),
            "compression": None,
            "format": "mds",
            "hashes": [_HASH],
            "size_limit": _FILE_BYTES,
            "version": 2,
        }
        data = _pack([_pack_fields(row, names) for row in block], json.dumps(columns, sort_keys=True).encode())
        name = f"shard.{number:05d}.mds"
        write_whole(out / name, data)
        raw = {"basename": name, "bytes": len(data), "hashes": {_HASH: xxhash.xxh64(data).hexdigest()}}
        shards.append({**columns, "raw_data": raw, "samples": len(block), "zip_data": None})
    write_whole(out / "index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True))


def write_litdata(out: Path, rows: Iterable[Fields], per_file: int) -> None:
    """Write LitData without compression: dictionaries in `chunk-0-0.bin` …, and `index.json` at the end.

    Args:
        out: folder, created if necessary.
        rows: samples, all with the same columns of text and bytes.
        per_file: largest number of samples per file.
    """
    chunks: list[dict[str, object]] = []
    kinds: dict[str, str] = {}
    for number, block in enumerate(_blocks(rows, per_file)):
        kinds = kinds or {name: type(value).__name__ for name, value in block[0].items()}
        data = _pack([_pack_fields(row, list(kinds)) for row in block])
        name = f"chunk-0-{number}.bin"
        write_whole(out / name, data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(block), "dim": None, "filename": name})
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = {"type": "builtins.dict", "context": json.dumps(list(kinds)), "children_spec": [leaf] * len(kinds)}
    config = {
        "chunk_bytes": _FILE_BYTES,
        "chunk_size": None,
        "compression": None,
        "data_format": list(kinds.values()),
        "data_spec": json.dumps([1, spec]),  # torch.utils._pytree's format
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    index = {"chunks": chunks, "config": config, "updated_at": str(time.time())}
    write_whole(out / "index.json", json.dumps(index, sort_keys=True))


def _blocks(rows: Iterable[Fields], per_file: int) -> Iterator[list[Fields]]:
    """Yield the samples of each file."""
    block: list[Fields] = []
    size = 0
    for row in rows:
        row_size = sum(map(len, row.values()))
        if block and (len(block) == per_file or size + row_size > _FILE_BYTES):
            yield block
            block, size = [], 0
        block.append(row)
        size += row_size
    if block:
        yield block


def _pack_fields(row: Fields, names: list[str]) -> bytes:
    values = [value.encode() if isinstance(value, str) else value for value in (row[name] for name in names)]
    return np.array([len(value) for value in values], "<u4").tobytes() + b"".join(values)


def _pack(samples: list[bytes], header: bytes = b"") -> bytes:
    """Return a file: number of samples, offsets, header, samples."""
    begin = 4 * (len(samples) + 2) + len(header)
    offsets = begin + np.cumsum([0, *map(len, samples)])
    return np.array([len(samples), *offsets], "<u4").tobytes() + header + b"".join(samples)
