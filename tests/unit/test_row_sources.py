"""Sources of other libraries: Parquet, Hugging Face datasets, MDS, LitData, Energon, and tables."""

import io
import json
import random
import shutil
import struct
from contextlib import closing
from itertools import islice

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from evals.suite.loss_task import LossTaskConfig, open_held_out
from sparo_data.convert_rows import write_rows
from sparo_data.packed_files import write_litdata, write_mds
from sparo_train.core.config import resolve
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.decode.decoding import TRAINING, decode
from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
from sparo_train.data.examples.samples import caption, image_bytes
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.rows import groups
from sparo_train.data.sources.base import DataConfig, close_storages
from sparo_train.data.sources.fingerprint import fingerprint, refuse_changed
from tests.helpers.formats import COUNT, FIXTURES, FORMATS, KINDS, contents, opened, rows, write, write_table
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import losses
from tests.unit.test_lossless_layouts import write_tar
from tests.unit.test_remote import server  # noqa: F401  a fixture


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_read_as_it_was_written(kind, tmp_path):
    source = opened(write(kind, tmp_path))
    count = 8 if kind == "energon" else COUNT
    assert source.samples == count and source.config.kind == {"dataset": "datasets"}.get(kind, kind)
    assert contents(source) == [(FIXTURES.jpeg(i), [FIXTURES.caption(i)]) for i in range(count)]
    for storage in source.storages:
        keys = [storage.read(number)[0] for number in range(len(storage))]
        assert len(set(keys)) == len(keys)
    close_storages()


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_raw_pictures_keep_their_pixels(kind):
    source = opened({kind: str(FORMATS / kind / "raw")})
    for number, (image, texts) in enumerate(contents(source)):
        assert np.array_equal(np.asarray(decode(image, TRAINING)), np.asarray(FIXTURES.picture(number)))
        assert texts == [FIXTURES.caption(number)]


def test_values_without_names_are_read_by_number():
    source = opened({"litdata": str(FORMATS / "litdata/tuple"), "caption_key": "1"})
    assert contents(source) == [(FIXTURES.jpeg(i), [FIXTURES.caption(i)]) for i in range(COUNT)]


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_lists_and_several_columns_of_captions(kind, tmp_path):
    block = write(kind, tmp_path)
    source = opened({**block, "caption_key": "many"})
    assert [texts for _, texts in contents(source)] == [[f"a {i}", f"b {i}"] for i in range(COUNT)]
    both = opened({**block, "captions": {"text": 0.5, "many": 0.5}})
    _, fields = both.storages[0].read(3)
    drawn = {caption(fields, both.config, np.random.default_rng(seed)) for seed in range(40)}
    assert drawn == {FIXTURES.caption(3), "a 3", "b 3"}


def test_splits_and_selections_of_datasets(tmp_path):
    whole = datasets.Dataset.from_list([{"image": FIXTURES.picture(i), "caption": f"{i}"} for i in range(COUNT)])
    whole = whole.cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": whole.shuffle(seed=1).select(range(5)), "test": whole}).save_to_disk(tmp_path / "d")
    source = opened({"dataset": str(tmp_path / "d")})
    order = [int(texts[0]) for _, texts in contents(source)]
    assert len(order) == 5 and order != sorted(order)
    for number, (image, _) in zip(order, contents(source), strict=True):
        assert np.array_equal(np.asarray(decode(image, TRAINING)), np.asarray(FIXTURES.picture(number)))
    assert opened({"dataset": str(tmp_path / "d"), "split": "test"}).samples == COUNT
    with pytest.raises(
        DataError, match=r"data\.sources\.a\.split: .* has no split 'val'. Name one of its splits: train, test"
    ):
        opened({"dataset": str(tmp_path / "d"), "split": "val"})


def batches(block, count, workers, cursor=None):
    config = resolve(
        DataConfig,
        {"sources": {"a": block}, "workers": workers, "streams": 2, "shuffle_window": 5, "chunk": 2, "hflip": 0.5},
        "x",
    )
    pipeline = Pipeline(config, 4, ImageTextExamples(config, 16, 16, ClipTokenizer(16)), 3)
    with closing(pipeline.start(cursor)) as started:
        return list(islice(started, count))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_do_not_depend_on_workers_and_resume_exactly(kind, tmp_path):
    block = write(kind, tmp_path)
    straight = batches(block, 9, 0)
    runs = [batches(block, 9, 2), straight[:4] + batches(block, 5, 1, straight[3].cursor)]
    for run in runs:
        for one, two in zip(straight, run, strict=True):
            assert one.cursor == two.cursor and all(torch.equal(one.batch[k], two.batch[k]) for k in one.batch)


def change(kind, folder):
    """Change the content of a set."""
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows()[::-1]), folder / "a.parquet", row_group_size=5)
    elif kind == "dataset":
        shutil.rmtree(folder / "set")
        changed = datasets.Dataset.from_list(rows()[::-1]).cast_column("image", datasets.Image())
        changed.save_to_disk(folder / "set")
    elif kind == "table":
        lines = (folder / "t.csv").read_text()
        (folder / "t.csv").write_text(lines.replace("caption 3", "caption 4"))
    elif kind == "energon":
        split = folder / ".nv-meta/split.yaml"
        split.write_text(split.read_text().replace("{000..001}", "{000..002}"))
    else:
        index = json.loads((folder / "plain/index.json").read_text())
        key = "shards" if kind == "mds" else "chunks"
        index[key] = index[key][:-1]
        (folder / "plain/index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", KINDS)
def test_changed_data_is_noticed_and_moved_data_is_not(kind, tmp_path):
    block = write(kind, tmp_path / "here")
    before = fingerprint([opened(block)])
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    (key, value), *_ = block.items()
    refuse_changed(before, fingerprint([opened({key: value.replace("/here", "/there")})]), "x")
    change(kind, tmp_path / "here")
    with pytest.raises(DataError, match="the data changed since this checkpoint"):
        refuse_changed(before, fingerprint([opened(block)]), "x")


def test_announced_rows_are_decoded_once_per_announcement(tmp_path, monkeypatch):
    source = opened(write("parquet", tmp_path))
    tables = []
    group_type = type(source.storages[0])
    real = group_type.table
    monkeypatch.setattr(group_type, "table", lambda self: tables.append(self.url) or real(self))
    monkeypatch.setattr(groups, "_GROUPS", 1)
    for storage in source.storages:
        storage.read_ahead(0, len(storage))
    order = [(storage, n) for storage in source.storages for n in range(len(storage))]
    random.Random(0).shuffle(order)
    for storage, number in order:
        storage.read(number)
    assert len(tables) == 3
    reader = groups.process_groups()
    assert not reader._waiting and not reader._bytes
    monkeypatch.setattr(groups, "_AHEAD_BYTES", 0)
    source.storages[0].read_ahead(0, 5)
    assert not reader._waiting and source.storages[0].read(2)[1]
    close_storages()


@pytest.mark.parametrize("separator", [",", "\t", ";"])
def test_tables_of_any_separator(separator, tmp_path):
    write_table(tmp_path / "t", separator)
    assert opened({"table": str(tmp_path / "t/t.csv")}).samples == COUNT


def test_names_of_columns_in_upper_case(tmp_path):
    write_table(tmp_path)
    text = (tmp_path / "t.csv").read_text().replace("filepath,title,note", " FilePath,TITLE,note")
    (tmp_path / "t.csv").write_text(text)
    source = opened({"table": str(tmp_path / "t.csv")})
    assert contents(source) == [(FIXTURES.jpeg(i), [FIXTURES.caption(i)]) for i in range(COUNT)]


def test_signatures_of_image_addresses_are_in_no_message(server, tmp_path):  # noqa: F811
    address = f"http://me:secret@127.0.0.1:{server.server_port}/none.jpg?sig=secret"
    (tmp_path / "t.tsv").write_text(f"url\tcaption\n{address}\tone\n")
    for keys in ({}, {"url_cache": str(tmp_path / "cache")}):
        (storage,) = opened({"table": str(tmp_path / "t.tsv"), **keys}).storages
        with pytest.raises((DataError, BadSampleError)) as failed:
            storage.read(0)
        message = f"{failed.value} {getattr(failed.value, 'key', '')} {getattr(failed.value, 'detail', '')}"
        assert "none.jpg" in message and "secret" not in message


def test_images_by_url_are_downloaded_once(tmp_path):
    (tmp_path / "far").mkdir()
    far = tmp_path / "far/0.jpg"
    far.write_bytes(FIXTURES.jpeg(0))
    (tmp_path / "t.tsv").write_text(f"url\tcaption\nfile://{far}\tone\nfile://{tmp_path}/none.jpg\ttwo\n")
    block = {"table": str(tmp_path / "t.tsv")}
    with pytest.raises(DataError, match="Set url_cache or the option --url-cache to a folder for the downloads"):
        opened(block).storages[0].read(0)
    (storage,) = opened({**block, "url_cache": str(tmp_path / "cache")}).storages
    for _ in range(2):
        assert image_bytes(storage.read(0)[1], ["url"]) == FIXTURES.jpeg(0)
        far.unlink(missing_ok=True)  # the second time from the cache
    with pytest.raises(BadSampleError, match="image not downloaded"):
        storage.read(1)
    table, cache = str(tmp_path / "t.tsv"), ("--url-cache", str(tmp_path / "cache"))
    refused = sparo("data", "convert", table, str(tmp_path / "out"))
    assert refused.returncode == 2 and "add --url-cache FOLDER for the addresses in url" in refused.stderr
    checked = sparo("data", "check", table, *cache)
    assert checked.returncode == 1 and "image not downloaded: 1" in checked.stdout, checked.stderr
    done = sparo("data", "convert", table, str(tmp_path / "out"), *cache)
    assert done.returncode == 0 and "left out: 1 samples (image not downloaded)" in done.stderr, done.stderr
    (shard,) = opened({"shards": str(tmp_path / "out")}).storages
    assert image_bytes(shard.read(0)[1], ["jpg"]) == FIXTURES.jpeg(0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_checked_converted_and_converted_back(kind, tmp_path):
    ((_, place),) = write(kind, tmp_path / "given").items()
    checked = sparo("data", "check", place)
    count = 8 if kind == "energon" else COUNT
    assert checked.returncode == 0 and f"{count} samples; nothing broken" in checked.stdout, checked.stderr
    if kind not in ("table", "energon"):
        place_there = str(tmp_path / "shards")
        done = sparo("data", "convert", place, place_there)
        assert done.returncode == 0 and f"{count} samples" in done.stderr, done.stderr
        shards = opened({"shards": place_there})
        assert contents(shards) == contents(opened({kind: place}))
        place = place_there
    done = sparo("data", "convert", place, str(tmp_path / "back"), "--to", "parquet")
    assert done.returncode == 0, done.stderr
    back = opened({"parquet": str(tmp_path / "back")})
    assert contents(back) == [(FIXTURES.jpeg(i), [FIXTURES.caption(i)]) for i in range(count)]
    again = sparo("data", "convert", place, str(tmp_path / "back"), "--to", "parquet")
    assert again.returncode == 2 and "is not empty, and files of two data sets would mix" in again.stderr


@pytest.mark.long
@pytest.mark.parametrize("to", ["dataset", "mds", "litdata", "table"])
def test_shards_are_converted_to_every_format_and_back(to, tmp_path):
    members = [
        member
        for i in range(COUNT - 1)
        for member in ((f"{i}.jpg", FIXTURES.jpeg(i)), (f"{i}.txt", FIXTURES.caption(i).encode()))
    ]
    members += [(f"{COUNT}.jpg", FIXTURES.jpeg(COUNT)), (f"{COUNT}.txt", b'["first", "second"]')]
    members += [(f"{COUNT}.json", b'{"url": "u"}'), ("broken.txt", b"no image")]
    write_tar(tmp_path / "shards/0.tar", members)
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    done = sparo("data", "convert", str(tmp_path / "shards"), there, "--to", to, "--per-shard", "5")
    assert done.returncode == 0 and "left out: 1 samples (missing image)" in done.stderr, done.stderr
    if to == "dataset":  # another set in a folder of the same name is other data
        again = write_rows(opened({"shards": str(tmp_path / "shards")}), tmp_path / "elsewhere/there", to, 5)
        assert again.train == COUNT
        ours, theirs = (opened({"dataset": str(p)}).storages[0].digest() for p in (there, tmp_path / "elsewhere/there"))
        assert ours != theirs
    place = f"{there}/table.tsv" if to == "table" else there
    assert f"sparo data check {place}" in done.stdout
    checked = sparo("data", "check", place)
    assert checked.returncode == 0 and "nothing broken" in checked.stdout, checked.stderr
    done = sparo("data", "convert", place, back)
    assert done.returncode == 0, done.stderr
    found = [storage.read(i)[1] for storage in opened({"shards": back}).storages for i in range(len(storage))]
    plain, last = found[: COUNT - 1], found[COUNT - 1 :]
    assert [(f["jpg"], f["txt"].decode()) for f in plain] == [
        (FIXTURES.jpeg(i), FIXTURES.caption(i)) for i in range(COUNT - 1)
    ]
    # A table has a row per caption.
    assert [f["txt"].decode() for f in last] == (["first", "second"] if to == "table" else ["first"])
    facts = json.loads(last[0]["json"])
    assert "u" in str(facts) and (to == "table" or "second" in str(facts))


def test_json_that_cannot_be_read_is_kept_in_packed_files(tmp_path):
    members = [("0.jpg", FIXTURES.jpeg(0)), ("0.txt", b'["a", "b"]'), ("0.json", b"{broken")]
    write_tar(tmp_path / "in/0.tar", members)
    write_rows(opened({"shards": str(tmp_path / "in")}), tmp_path / "out", "mds", 10)
    (fields,) = [s.read(0)[1] for s in opened({"mds": str(tmp_path / "out"), "all_columns": True}).storages]
    assert b"{broken" in b"".join(fields.values())


def test_undecodable_images_become_rows_of_a_table(tmp_path):
    write_tar(
        tmp_path / "in/0.tar", [("0.jpg", FIXTURES.jpeg(0)), ("0.txt", b"a"), ("1.jpg", b"broken"), ("1.txt", b"b")]
    )
    write_rows(opened({"shards": str(tmp_path / "in")}), tmp_path / "out", "table", 10)
    lines = (tmp_path / "out/table.tsv").read_text().splitlines()
    assert [line.split("\t")[:2] for line in lines[1:]] == [
        ["images/0000/000000000.jpg", "a"],
        ["images/0000/000000001.bin", "b"],
    ]


def test_packed_files_are_those_of_the_libraries_that_own_the_formats(tmp_path):
    """Compare the bytes with those that mosaicml-streaming and litdata wrote, except for columns that are not text or bytes."""
    rows = [{"image": FIXTURES.jpeg(i), "caption": FIXTURES.caption(i)} for i in range(COUNT)]
    write_litdata(tmp_path, rows, 5)
    for name in ("chunk-0-0.bin", "chunk-0-1.bin", "chunk-0-2.bin"):
        assert (tmp_path / name).read_bytes() == (FORMATS / "litdata/tuple" / name).read_bytes()
    ours, theirs = (json.loads((folder / "index.json").read_text()) for folder in (tmp_path, FORMATS / "litdata/tuple"))
    assert ours["chunks"] == theirs["chunks"]
    assert {key: ours["config"][key] for key in ("data_format", "compression", "item_loader")} == {
        key: theirs["config"][key] for key in ("data_format", "compression", "item_loader")
    }
    write_mds(tmp_path, rows, 9)
    ours, theirs = (json.loads((folder / "index.json").read_text()) for folder in (tmp_path, FORMATS / "mds/plain"))
    assert [set(shard) for shard in ours["shards"]] == [set(shard) for shard in theirs["shards"]]
    assert [shard["samples"] for shard in ours["shards"]] == [shard["samples"] for shard in theirs["shards"]]
    data, header = (tmp_path / "shard.00000.mds").read_bytes(), 4 * (9 + 2)
    (begin,) = struct.unpack_from("<I", data, 4)
    stored = json.loads(data[header:begin])
    assert set(stored) == set(json.loads((FORMATS / "mds/plain/shard.00000.mds").read_bytes()[header:307]))
    caption, image = FIXTURES.caption(0).encode(), FIXTURES.jpeg(0)
    assert (
        data[begin : begin + 8 + len(caption + image)] == struct.pack("<II", len(caption), len(image)) + caption + image
    )


def test_files_of_packed_samples_stay_below_64_mib(tmp_path):
    rows = [{"image": b"x" * (20 << 20), "caption": str(i)} for i in range(5)]
    write_litdata(tmp_path, rows, 1000)
    assert [chunk["chunk_size"] for chunk in json.loads((tmp_path / "index.json").read_text())["chunks"]] == [3, 2]


def test_a_converted_set_keeps_lists_of_captions_and_holds_out_images(tmp_path):
    place = write("parquet", tmp_path)["parquet"]
    bad = [*rows(), {**rows()[0], "image": {"bytes": b"no image", "path": None}}, {**rows()[1], "many": []}]
    pq.write_table(pa.Table.from_pylist(bad), tmp_path / "a.parquet")
    done = sparo("data", "convert", place, str(tmp_path / "out"), "--caption-column", "many", "--test", "3")
    assert done.returncode == 0 and "left out: 1 samples (missing caption)" in done.stderr, done.stderr
    assert "left out: 1 samples (bad image)" in done.stderr and "9 samples for training, 3 images" in done.stderr
    train = opened({"shards": str(tmp_path / "out/train"), "caption_key": "json:many"})
    held_out = opened({"shards": str(tmp_path / "out/retrieval/test")}).storages[0].read(0)[1]["txt"].decode()
    lists = [texts for _, texts in contents(train)]
    assert len(lists) == 9 and all(len(texts) == 2 for texts in lists)
    assert held_out.split("\n")[0].startswith("a ") and held_out.split("\n")[1].startswith("b ")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_stopped_and_resumed(kind, tmp_path):
    block = write(kind, tmp_path / "set")
    recipe = tiny_recipe(tmp_path, tmp_path / "runs", steps=6, eval={"tasks": {}})
    recipe["data"] |= {"sources": {"a": block}, "streams": 2}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    for arguments in (("name=whole",), ("name=cut", "stop_after_steps=4"), ("name=cut", "stop_after_steps=12")):
        done = sparo("train", str(tmp_path / "r.yaml"), *arguments)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs/whole") == losses(tmp_path / "runs/cut") and len(losses(tmp_path / "runs/cut")) == 6


def test_lists_with_weights_are_a_source_each():
    def sources(block):
        return resolve(DataConfig, {"sources": {"m": block}}, "r.yaml").sources

    found = sources({"shards": "a/{0..1}.tar::b.tar", "weight": "1::2.5", "caption_key": "json:text"})
    assert {name: (s.shards, s.weight, s.caption_key) for name, s in found.items()} == {
        "m_0": ("a/{0..1}.tar", 1.0, "json:text"),
        "m_1": ("b.tar", 2.5, "json:text"),
    }
    assert sources({"shards": "a::b"})["m"].weight == 1
    with pytest.raises(ConfigError, match="3 weights for 2 lists"):
        sources({"shards": "a::b", "weight": "1::2::3"})
    with pytest.raises(ConfigError, match=r"m_1\.weight: .*got 'x'"):
        sources({"shards": "a::b", "weight": "1::x"})


def test_sources_of_different_kinds_are_mixed_by_weight(tmp_path):
    blocks = {kind: write(kind, tmp_path / kind) for kind in KINDS}
    config = resolve(
        DataConfig,
        {
            "sources": {k: {**b, "weight": 2.0 if k == "mds" else 1.0} for k, b in blocks.items()},
            "streams": 4,
            "workers": 0,
        },
        "x",
    )
    pipeline = Pipeline(config, 4, ImageTextExamples(config, 16, 16, ClipTokenizer(16)), 3)
    plan, counts = pipeline.plan, {}
    for position in range(plan.epoch_size):
        ref = plan.sample_at(position % 4, position // 4)
        counts[pipeline.sources[ref.source].name] = counts.get(pipeline.sources[ref.source].name, 0) + 1
    assert counts == {k: {"mds": 2 * COUNT, "energon": 8}.get(k, COUNT) for k in KINDS}
    with closing(pipeline.start()) as started:
        assert sum(len(b.batch["image"]) for b in islice(started, plan.epoch_size // 4)) == plan.epoch_size


def test_row_groups_stay_together_and_older_runs_continue_in_their_order(tmp_path):
    pq.write_table(pa.Table.from_pylist(rows()[:8]), tmp_path / "a.parquet", row_group_size=4)
    block = {"sources": {"a": {"parquet": str(tmp_path / "a.parquet")}}, "streams": 1, "shuffle_window": 8, "chunk": 1}
    configs = [DataConfig.model_validate({**block, **change}) for change in ({}, {"whole_groups": False})]
    now, before = (Pipeline(c, 2, ImageTextExamples(c, 16, 16, ClipTokenizer(16)), 0) for c in configs)
    groups, parts = ([*pipeline.plan.window_chunks(0, 0)] for pipeline in (now, before))
    assert [end - first for _, _, first, end in groups] == [4, 4] and len(parts) > 2
    assert "whole_groups" not in before.fingerprint["plan"]
    with pytest.raises(DataError, match=r"x: was written with another order.*set data\.whole_groups=false"):
        refuse_changed(before.fingerprint, now.fingerprint, "x")
    with pytest.raises(DataError, match=r"set data\.whole_groups=true"):
        refuse_changed(now.fingerprint, before.fingerprint, "x")


def test_row_groups_on_a_server_are_fetched_once(server):  # noqa: F811
    content = io.BytesIO()
    noise = np.random.default_rng(0)
    columns = [{"image": noise.bytes(9000), "caption": f"{i}", "other": noise.bytes(50)} for i in range(600)]
    pq.write_table(pa.Table.from_pylist(columns), content, row_group_size=200, compression="none")
    server.files["/a.parquet"] = content.getvalue()
    source = opened({"parquet": f"{server.at}/a.parquet"})
    for storage in source.storages:
        storage.read_ahead(0, 100)
        storage.read_ahead(100, 200)
        assert [storage.read(n)[1]["image"] for n in range(200)] == [
            columns[int(json.loads(storage.read(n)[1]["json"])["caption"])]["image"] for n in range(200)
        ]
    close_storages()
    assert server.sent < 1.05 * len(content.getvalue())


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_samples_can_have_any_format(kind, tmp_path):
    ((_, place),) = write(kind, tmp_path).items()
    source = open_held_out(LossTaskConfig(shards=place))
    assert source.samples == (8 if kind == "energon" else COUNT) and contents(source)[3][0] == FIXTURES.jpeg(3)
