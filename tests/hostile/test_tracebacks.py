"""Unusual words, records and files that once ended with a traceback."""

import gzip
import json
import struct
import tracemalloc

import google_crc32c
import pytest
import yaml

from evals.encoders.loading import load_encoder
from launch.commands.train import train
from launch.jobs.records import Records
from launch.monitor.status import statuses
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import CheckpointError, ConfigError, DataError
from sparo_train.core.recipe.layers import override
from sparo_train.data.decode.tfrecord import records
from sparo_train.data.servers.remote import find_shards
from sparo_train.train.run_config import RunConfig
from tests.helpers.logs import logged
from tests.helpers.recipes import tiny_recipe
from tests.hostile.conftest import assert_ends
from tests.unit.test_core import sign


@pytest.mark.parametrize(
    "words", [['out="a\\0b"'], ['name="a\\0b"'], ['data.sources.a.shards="a\\0b"'], ["a" + ".a" * 5000 + "=1"]]
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_unknown_words_of_a_command_line_are_named(words, dry, shards, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(shards, tmp_path)))
    assert_ends(
        ["train", str(recipe), *words, *dry],
        2,
        ["NUL character" if "\\0" in words[0] else "at most 64 levels, got 5001"],
    )


def test_keys_that_are_too_deep_and_documents_for_shards_are_refused():
    with pytest.raises(ConfigError, match="at most 64 levels, got 65"):
        override({}, ["a" + ".a" * 64 + "=1"])
    for place in ("data:,hello", "data:", "data:text/plain;base64,aGk="):
        with pytest.raises(ConfigError, match="is a data: URL, not a shard"):
            find_shards(place, "data.sources.a.shards")


@pytest.mark.parametrize("cluster", [{}, {"kind": 3}, {"kind": "local"}, {"kind": "slurm", "starter": "srun"}])
def test_submissions_of_other_versions_are_read_or_skipped(cluster, tmp_path):
    records_ = Records(tmp_path)
    records_.jobs.mkdir()
    (records_.jobs / "submitted.jsonl").write_text(json.dumps({"jobs": ["1"], "on": "x", "cluster": cluster}) + "\n")
    whole = isinstance(cluster.get("kind"), str)
    if whole:
        assert statuses([tmp_path])[0].job == "1"
    else:
        with pytest.raises(ConfigError, match="no job was submitted there"):
            statuses([tmp_path])
    for verb in ("status", "logs", "cancel"):
        process_code = 2 if not whole or verb == "logs" else None
        if process_code is not None:
            assert_ends(["launch", verb, str(tmp_path)], process_code, [])


FIELDS = ("step", "samples", "cursor", "fingerprint", "bad_samples", "skipped_steps", "skipped_in_a_row", "files")


def test_an_incomplete_meta_with_a_valid_checksum_is_named(shards, tmp_path):
    config = resolve(RunConfig, tiny_recipe(shards, tmp_path, steps=3), "x")
    train(config)
    newest = store.CheckpointStore(config.folder / "checkpoints").latest()
    whole = (newest / "meta.json").read_text()
    for field in FIELDS:
        for value in (None, "x", 3.5):
            sign(newest, lambda meta, f=field, v=value: meta.pop(f) if v is None else meta.update({f: v}))
            with pytest.raises(CheckpointError, match=rf"meta\.json: {field} is missing or has the wrong type"):
                store.read_run_meta(newest)
            (newest / "meta.json").write_text(whole)
    sign(newest, lambda meta: meta.pop("cursor"))
    with pytest.raises(CheckpointError, match=r"meta\.json: cursor is missing"):
        train(config)
    assert_ends(["export", str(config.folder)], 2, ["meta.json: cursor is missing"])


def test_a_record_that_unpacks_to_gigabytes_is_refused_before_it_is_read(tmp_path):
    length = struct.pack("<Q", 1 << 30)
    crc = google_crc32c.value(length)
    masked = struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    path = tmp_path / "bomb.tfrecord"
    path.write_bytes(gzip.compress(length + masked + bytes(1 << 24)))
    tracemalloc.start()
    with pytest.raises(DataError, match="record 0: has 1074 MB, more than the limit of 268 MB"):
        list(records(path))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_every_reader_warns_of_a_checkpoint_that_may_not_be_the_intended_one(shards, tmp_path):
    config = resolve(
        RunConfig, tiny_recipe(shards, tmp_path, steps=3, checkpoint={"every_steps": 1, "keep_last": 3}), "x"
    )
    train(config)
    checkpoints = config.folder / "checkpoints"
    with logged() as heard:
        load_encoder(config.folder)
    assert heard == []
    (checkpoints / "step-00000003/meta.json").unlink()
    said = "step-00000003: is incomplete; step-00000002 is read instead"
    with logged() as heard:
        load_encoder(config.folder)
        load_encoder(checkpoints / "step-00000001")  # an explicitly named checkpoint is used
    assert len(heard) == 1 and heard[0].endswith(said)
    assert_ends(["export", str(config.folder)], 0, [said])
    sign(checkpoints / "step-00000002", lambda meta: meta.update(suspect=True))
    with logged() as heard:
        load_encoder(checkpoints / "step-00000002")
    assert "was written while training skipped steps" in heard[0]
    # What a killed writer left is incomplete. What replaced an equal step is complete.
    (checkpoints / ".tmp-old-step-00000009").mkdir()
    (checkpoints / ".tmp-x-step-00000004").mkdir()
    assert store.CheckpointStore(checkpoints).unfinished().name == ".tmp-x-step-00000004"


def test_a_folder_above_or_inside_a_run_names_the_run(shards, tmp_path):
    for name in ("one", "two"):
        train(resolve(RunConfig, tiny_recipe(shards, tmp_path / "runs", steps=3, name=name), "x"))
    above, inside = str(tmp_path / "runs"), str(tmp_path / "runs/one/checkpoints")
    for words in (["eval", above], ["export", above], ["slots", "score", above, "--tasks", "x"]):
        assert_ends(words, 2, [f"{above}: is a folder of runs, not a run. Give {above}/one or another of the 2."])
    assert_ends(["eval", inside], 2, [f"Give the run's folder ({above}/one) or one checkpoint (a step-… folder)."])
