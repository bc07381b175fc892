"""Data that changed during a run, runs that were moved, and resumes near the end of an epoch."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.commands import demo
from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Cursor
from sparo_train.core.disk import metrics
from sparo_train.core.errors import DataError
from sparo_train.core.world import World
from sparo_train.train.build import build_pipeline
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample
from tests.hostile.conftest import assert_ends


def run(tree):
    return resolve(RunConfig, tree, "test")


def test_a_run_and_its_data_may_be_moved(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "here")
    straight = train(run({**tree, "name": "straight"})).checkpoint
    train(run({**tree, "stop_after_steps": 5}))
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "here/tiny", tmp_path / "there/renamed")
    shutil.move(shards, tmp_path / "elsewhere")
    moved = tiny_recipe(tmp_path / "elsewhere", tmp_path / "there", name="renamed")
    found = train(run(moved)).checkpoint
    ours = load_file(found / "model.safetensors")
    assert all(torch.equal(t, ours[name]) for name, t in load_file(straight / "model.safetensors").items())


def test_different_captions_of_equal_length_are_another_data_set(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "runs")
    train(run({**tree, "stop_after_steps": 3}))

    def reversed_words(i):
        key, fields = sample(i)
        return key, {**fields, "txt": fields["txt"][::-1]}

    write_shards(shards, (reversed_words(i) for i in range(96)), 24)
    with pytest.raises(DataError, match=r"a\.seen: .* -> .*"):
        train(run(tree))


@pytest.mark.long
def test_recorded_hashes_notice_changes_that_the_index_does_not(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "runs")
    assert_ends(["data", "check", "--hash", str(shards)], 0, [])
    train(run({**tree, "stop_after_steps": 3}))
    train(run({**tree, "stop_after_steps": 4}))
    first = shards / "00000.tar"
    data, stat = bytearray(first.read_bytes()), first.stat()
    at = data.index(b"\xff\xd8") + 30
    data[at] ^= 1  # in the first image, which the check does not sample
    first.write_bytes(bytes(data))
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    train(run({**tree, "stop_after_steps": 5}))  # names, sizes, times and the sampled images are the same
    assert_ends(["data", "check", "--hash", str(shards)], 0, [])
    with pytest.raises(DataError, match=r"a\.content: "):
        train(run(tree))


def test_resumes_near_the_end_of_an_epoch_continue_with_other_world_sizes(shards):
    tree = tiny_recipe(shards, Path("runs"), batch_size=12)
    tree["data"] |= {"streams": 6, "workers": 0}
    config = run(tree)

    def read(size, steps, cursor):
        """Return the global batches of `size` ranks, and where each ends."""
        found, positions = [[] for _ in range(steps)], []
        for rank in range(size):
            batches = build_pipeline(config, World(rank, size)).start(cursor)
            for step in range(steps):
                delivery = next(batches)
                found[step].append(delivery.batch)
            positions.append(delivery.cursor)
            batches.close()
        joined = [{key: torch.cat([part[key] for part in parts]) for key in ("image",)} for parts in found]
        return joined, Cursor.join(positions)

    whole, end = read(1, 24, None)  # eight steps make an epoch
    got, cursor = [], None
    for size, steps in (
        (2, 7),
        (1, 1),
        (3, 1),
        (2, 7),
        (1, 8),
    ):  # stopped before, at and after the end of an epoch, and of the next one
        some, cursor = read(size, steps, cursor)
        got += some
    assert cursor == end and len(got) == 24
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(got, whole, strict=True))


def test_resumes_near_the_end_of_an_epoch_are_bit_identical(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, steps=15, checkpoint={"every_steps": 0, "every_minutes": 0})
    straight = train(run({**tree, "name": "straight"})).checkpoint
    for stop in (11, 12, 13, 15):  # twelve steps make an epoch
        last = train(run({**tree, "stop_after_steps": stop})).checkpoint
    for part in ("model", "optimizer"):
        theirs, ours = (load_file(place / f"{part}.safetensors") for place in (straight, last))
        assert theirs.keys() == ours.keys() and all(torch.equal(t, ours[name]) for name, t in theirs.items())
    steps = [r["step"] for r in metrics.read(tmp_path / "tiny/metrics.jsonl", "train")]
    assert steps == list(range(1, 16))


def test_the_demo_trains_from_where_it_rendered(tmp_path):
    place = tmp_path / "x #1: [a] 😀"
    config = demo._config("CLIP", place, place / "scenes", quick=True)
    assert config.out == str(place) and config.data.sources["scenes"].shards == str(place / "scenes/train")
    assert config.eval.tasks["pairs"].root == str(place / "scenes/pairs")
