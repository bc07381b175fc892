"""Damaged, hostile and misinterpreted data sets of other libraries."""

import builtins
import json
import random
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparo_train.core.config import resolve
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.examples.samples import caption, image_bytes, list_captions
from sparo_train.data.sources.base import DataConfig, close_storages
from tests.helpers.formats import COUNT, FIXTURES, FORMATS, KINDS, contents, opened, rows, write, write_table
from tests.helpers.processes import sparo
from tests.unit.test_remote import server  # noqa: F401  a fixture


def target(kind, folder, number):
    """Return the file that variant `number` of the hostile files damages."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".jpg", ".idx"))
    if kind in ("mds", "litdata"):
        files = [path for path in files if "/plain/" in str(path)]
    return files[number % len(files)]


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_end_in_an_error_or_in_bad_samples(kind, tmp_path):
    block, good = write(kind, tmp_path / "good"), 0
    for number in range(24):
        rng = random.Random(number)
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "good", folder)
        path = target(kind, folder, number)
        data = bytearray(path.read_bytes())
        damage = number // 4 % 6
        if damage == 0:
            data = data[: rng.randrange(len(data))]
        elif damage == 1:
            for _ in range(8):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif damage == 2:
            data[:64] = rng.randbytes(min(64, len(data)))
        elif damage == 3:
            data = bytearray(rng.randbytes(len(data)))
        elif damage == 4:
            data = bytearray(b"[" * 5000 + b"9" * 5000) if path.suffix == ".json" else data + data
        else:
            data = bytearray(bytes(data).replace(b"1", b"9" * 30).replace(b"2", b"-1"))
        path.write_bytes(data)
        try:
            source = opened({key: value.replace("/good", f"/{number}") for key, value in block.items()})
            for storage in source.storages:
                for ordinal in range(min(len(storage), 100)):
                    try:
                        _, fields = storage.read(ordinal)
                        image_bytes(fields, source.config.image_keys)
                        caption(fields, source.config)
                        good += 1
                    except BadSampleError as bad:
                        assert len(str(bad)) < 60
        except (DataError, ConfigError) as error:
            assert str(folder) in str(error) or "data.sources" in str(error), error
        finally:
            close_storages()
    assert good > 20  # files beside the damaged one are intact


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"mds": "{F}/mds/zstd"}, "is compressed with zstd"),
        ({"mds": "{F}/mds"}, "The folder has data sets in plain, raw, zstd"),
        ({"mds": "{F}/litdata/plain"}, "expected a list shards"),
        ({"litdata": "{F}/mds/plain"}, "litdata.optimize did not write it"),
        (
            {"litdata": "{F}/litdata/plain", "image_keys": ["picture"]},
            "no column for the image, got the columns image, cap",
        ),
        ({"mds": "{F}/mds/plain", "caption_key": "captoin"}, "did you mean 'caption'"),
        ({"energon": "{F}/energon", "split": "test"}, "has no split 'test'. Name one of its splits: train, val"),
        ({"energon": "{F}/mds"}, "energon prepare"),
        ({"parquet": "{F}/mds/plain"}, "matches no .parquet file; the folder has no .parquet files"),
        ({"table": "{F}/write.py"}, "no column for the image"),
        ({"table": "{F}/none.csv"}, "is not a file"),
        ({"dataset": "{F}/mds/plain"}, "split 'train', cannot be loaded"),
        ({"mds": "{F}/mds/plain", "shards": "x"}, "set exactly one of shards, folder, parquet"),
    ],
)
def test_mistakes_are_explained(block, message):
    block = {k: v.replace("{F}", str(FORMATS)) if isinstance(v, str) else v for k, v in block.items()}
    with pytest.raises((DataError, ConfigError), match=r"(?s)" + message.replace(".", r"\.")):
        opened(block)


def test_names_in_an_index_cannot_lead_out_of_the_folder(tmp_path):
    for kind, key in (("mds", "shards"), ("litdata", "chunks")):
        block = write(kind, tmp_path / kind)
        path = tmp_path / kind / "plain/index.json"
        index = json.loads(path.read_text())
        entry = index[key][0]
        (entry["raw_data"] if kind == "mds" else entry)["basename" if kind == "mds" else "filename"] = "../../secret"
        path.write_text(json.dumps(index))
        with pytest.raises(DataError, match="expected the name of a file in this folder"):
            opened(block)


def test_a_missing_library_names_its_extra(tmp_path, monkeypatch):
    blocks = {kind: write(kind, tmp_path / kind) for kind in ("parquet", "dataset")}
    real = builtins.__import__

    def refuse(name, *rest):
        if name.partition(".")[0] in ("pyarrow", "datasets"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for kind, extra in (("parquet", "parquet"), ("dataset", "datasets")):
        with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{extra}\]'"):
            opened(blocks[kind])


def test_tables_that_would_lose_rows_are_refused(tmp_path):
    (tmp_path / "a.jpg").write_bytes(FIXTURES.jpeg(0))
    (tmp_path / "q.csv").write_text('image,caption\na.jpg,one\na.jpg,"two inch\na.jpg,three\na.jpg,"four\na.jpg,five\n')
    with pytest.raises(DataError, match=r"q\.csv, line 3: a quotation mark joins several rows into one cell"):
        opened({"table": str(tmp_path / "q.csv")})
    (tmp_path / "m.csv").write_text('image,caption\na.jpg,"one, with\na second line, of text"\n')
    assert [texts for _, texts in contents(opened({"table": str(tmp_path / "m.csv")}))] == [
        ["one, with\na second line, of text"]
    ]
    (tmp_path / "d.csv").write_text("image,caption,caption\na.jpg,one,two\n")
    with pytest.raises(DataError, match="has 2 columns named 'caption'"):
        opened({"table": str(tmp_path / "d.csv")})
    (tmp_path / "e.csv").write_text("image,caption\n")
    done = sparo("data", "check", str(tmp_path / "e.csv"))
    assert done.returncode == 2 and "e.csv: has no samples" in done.stderr


def test_commands_read_or_refuse_every_source(tmp_path):
    one, two = (write_table(tmp_path / name) or str(tmp_path / name / "t.csv") for name in "ab")
    for places in ((one, two), (one, str(FORMATS / "mds/plain"))):
        done = sparo("data", "check", *places)
        assert done.returncode == 2 and "cannot be combined. Give one data set" in done.stderr
    several = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_list(rows()[:n]).cast_column("image", datasets.Image())
            for name, n in (("train", 7), ("test", 5))
        }
    )
    several.save_to_disk(tmp_path / "dict")
    assert "5 samples" in sparo("data", "check", str(tmp_path / "dict"), "--split", "test").stdout
    several["train"].save_to_disk(tmp_path / "plain")
    with pytest.raises(DataError, match="is one data set without splits, got 'test'"):
        opened({"dataset": str(tmp_path / "plain"), "split": "test"})
    (tmp_path / "hub").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pq.write_table(pa.Table.from_pylist(rows()), tmp_path / f"hub/{name}.parquet")
    with pytest.raises(
        ConfigError,
        match=r"contains the splits test, train\. Name the files of one split, as in .*hub/train-\*\.parquet",
    ):
        opened({"parquet": str(tmp_path / "hub")})
    assert opened({"parquet": str(tmp_path / "hub/train-*.parquet")}).samples == 2 * COUNT
    done = sparo("data", "convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--skip-missing")
    assert done.returncode == 2 and "--skip-missing: applies to folders and tables" in done.stderr
    for arguments, says in (
        (("data", "check", one, "--split", "test"), "split does not apply to data of kind table, got 'test'"),
        (("data", "convert", one, str(tmp_path / "o"), "--split", "test"), "--split: applies to Hugging Face"),
        (("data", "convert", one, str(tmp_path / "o"), "--as", "coco", "--to", "parquet"), "--to: applies to"),
    ):
        done = sparo(*arguments)
        assert done.returncode == 2 and says in done.stderr, done.stderr
    with pytest.raises(ConfigError, match=r"m_1: part 1 of sources\.m would also get this name"):
        resolve(DataConfig, {"sources": {"m": {"shards": "a::b", "weight": "1::2"}, "m_1": {"shards": "c"}}}, "x")
    with pytest.raises(ConfigError, match="several weights need several lists"):
        resolve(DataConfig, {"sources": {"m": {"parquet": "a::b", "weight": "1::2"}}}, "x")


def test_values_other_than_captions_and_unusual_images(tmp_path):
    odd = [{**row, "label": i, "depth": {"bytes": b"\x89PNG", "path": None}} for i, row in enumerate(rows())]
    table = pa.Table.from_pylist(odd)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table):  # an empty row group, which some writers produce
            writer.write_table(part)
    source = opened({"parquet": str(tmp_path / "a.parquet"), "caption_key": "label"})
    _, fields = source.storages[0].read(0)
    assert source.samples == COUNT and json.loads(fields["json"]) == {"label": 0}
    every = opened({"parquet": str(tmp_path / "a.parquet"), "all_columns": True})
    assert json.loads(every.storages[0].read(0)[1]["json"]).keys() == {"caption", "label", "many"}  # without `depth`
    with pytest.raises(BadSampleError, match="a caption that is not text: int"):
        list_captions(fields, source.config)
