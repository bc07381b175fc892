"""Small data sets in the formats of other libraries."""

import csv
import importlib.util
import os
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from sparo_train.core.config import resolve
from sparo_train.data.examples.samples import image_bytes, list_captions
from sparo_train.data.sources.base import DataConfig, open_source

FORMATS = Path(__file__).parents[1] / "data/formats"
_spec = importlib.util.spec_from_file_location("write_formats", FORMATS / "write.py")
FIXTURES = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(FIXTURES)
COUNT = FIXTURES.COUNT
KINDS = ("parquet", "dataset", "mds", "litdata", "energon", "table")


def rows(count=COUNT):
    return [
        {
            "image": {"bytes": FIXTURES.jpeg(i), "path": None},
            "text": FIXTURES.caption(i),
            "label": i % 3,
            "many": [f"a {i}", f"b {i}"],
        }
        for i in range(count)
    ]


def write_table(folder, separator=",", count=COUNT):
    (folder / "img").mkdir(parents=True)
    with (folder / "t.csv").open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=separator)
        writer.writerow(["filepath", "title", "note"])
        for i in range(count):
            (folder / f"img/{i}.jpg").write_bytes(FIXTURES.jpeg(i))
            writer.writerow([f"img/{i}.jpg", FIXTURES.caption(i), 'a "quoted"\ntext'])


def write(kind, folder):
    """Write or copy a small set; return its block in a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows()), folder / "a.parquet", row_group_size=5)
        return {"parquet": str(folder)}
    if kind == "dataset":
        part = datasets.Dataset.from_list(rows()).cast_column("image", datasets.Image())
        part.save_to_disk(folder / "set")
        return {"dataset": str(folder / "set")}
    if kind == "table":
        write_table(folder)
        return {"table": str(folder / "t.csv")}
    shutil.copytree(FORMATS / kind, folder, dirs_exist_ok=True)
    for index in folder.rglob("*.idx"):
        os.utime(index)  # the order of modification times in a checkout is arbitrary
    return {kind: str(folder)} if kind == "energon" else {kind: str(folder / "plain")}


def opened(block, name="a"):
    return open_source(name, resolve(DataConfig, {"sources": {name: block}}, "x").sources[name])


def contents(source):
    found = [storage.read(number)[1] for storage in source.storages for number in range(len(storage))]
    return [(image_bytes(fields, source.config.image_keys), list_captions(fields, source.config)) for fields in found]
