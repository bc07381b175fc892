"""Images per second of one loader worker from data sets of different formats, compared with webdataset shards.

    python benchmarks/formats.py [--quick] [--json FILE]

All sets have the same JPEG files of 256 pixels with captions, and are in the page cache. Batches of 64 with crops of 224
pixels. Parquet is read once with row groups of 256 rows, as `sparo data convert --to parquet` writes them, and once
with one row group of 2,048 rows, as other programs write them.
"""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COUNT, BATCH = 16_384, 64


def write_mds(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write MDS version 2 without compression."""
    folder.mkdir()
    names, shards = ["caption", "image"], []
    for number in range(0, len(rows), 1024):
        samples = []
        for row in rows[number : number + 1024]:
            text = row["caption"].encode()
            samples.append(struct.pack("<2I", len(text), len(row["image"])) + text + row["image"])
        offsets = [4 * (len(samples) + 2)]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample))
        content = struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + b"".join(samples)
        name = f"shard.{number // 1024:05d}.mds"
        (folder / name).write_bytes(content)
        shards.append(
            {
                "column_names": names,
                "column_encodings": ["str", "bytes"],
                "column_sizes": [None, None],
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(content)},
                "samples": len(samples),
                "version": 2,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def write_all(root: Path) -> dict[str, dict[str, str]]:
    """Write the set in all formats; returns blocks of `data.sources`."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    from loader import make_shards

    from sparo_train.data.sources.base import open_source
    from sparo_train.data.sources.shards import ShardsConfig

    paths = make_shards(root, 256, COUNT)
    source = open_source("a", ShardsConfig(shards=tuple(paths)))
    rows = []
    for storage in source.storages:
        for number in range(len(storage)):
            _, fields = storage.read(number)
            rows.append({"image": fields["jpg"], "caption": fields["txt"].decode()})
    table = pa.Table.from_pylist(rows)
    for size in (256, 2048):
        pq.write_table(table, root / f"{size}.parquet", row_group_size=size, compression="none")
    part = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    part.save_to_disk(root / "hf")
    write_mds(root / "mds", rows)
    (root / "files").mkdir()
    with (root / "t.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["filepath", "caption"])
        for number, row in enumerate(rows):
            (root / f"files/{number}.jpg").write_bytes(row["image"])
            writer.writerow([f"files/{number}.jpg", row["caption"]])
    return {
        "shards": {"shards": str(Path(paths[0]).parent)},
        "MDS": {"mds": str(root / "mds")},
        "Hugging Face datasets": {"dataset": str(root / "hf")},
        "Parquet, row groups of 256": {"parquet": str(root / "256.parquet")},
        "Parquet, row groups of 2,048": {"parquet": str(root / "2048.parquet")},
        "table of files": {"table": str(root / "t.csv")},
    }


def rate(block: dict[str, str], batches: int) -> float:
    """Return images per second of one worker."""
    import torch
    from loader import timed

    from sparo_train.core.config import resolve
    from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
    from sparo_train.data.read.loader import Pipeline
    from sparo_train.data.sources.base import DataConfig

    torch.set_num_threads(1)
    config = resolve(DataConfig, {"sources": {"a": block}, "workers": 1, "shuffle_window": 256}, "x")
    pipeline = Pipeline(config, BATCH, ImageTextExamples(config, 224, 77, ClipTokenizer(77)), 0)
    return timed((len(b.batch["image"]) for b in pipeline.start()), batches)


def main() -> None:
    from common import parser, report, row

    options = parser(__doc__).parse_args()
    rounds, batches = (1, 40) if options.quick else (5, 150)
    with tempfile.TemporaryDirectory() as root:
        blocks, rates = write_all(Path(root)), dict[str, list[float]]()
        for _ in range(rounds):
            for name, block in blocks.items():
                command = [sys.executable, __file__, "--measure", json.dumps([block, batches])]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rates.setdefault(name, []).append(float(done.stdout.split()[-1]))
    shards = rates.pop("shards")
    rows = [
        row(f"{name} / shards", list(zip(r, shards, strict=True)), None, "images/s", True) for name, r in rates.items()
    ]
    report("one worker, 256 pixels", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(rate(*json.loads(sys.argv[2])))
    else:
        main()
