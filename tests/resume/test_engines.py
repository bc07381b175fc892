"""Sharded engines and shared checkpoints on two ranks: killed, damaged, refused, and resumed without a difference."""

import json

import pytest

from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from tests.helpers.runs import assert_bit_equal, finish, losses, start_ranks, wait_for_step, with_a_straight_run

FSDP2 = "engine={kind: fsdp2, device: cpu, precision: fp32, timeout: 60}"
ZERO_2 = "engine={kind: deepspeed, stage: 2, device: cpu, precision: fp32, timeout: 60}"
ZERO_3 = "engine={kind: deepspeed, stage: 3, device: cpu, precision: fp32, timeout: 60}"
# A rank dies, or its disk fails, at one place of the program, given by the body of `at`.
_AT = """
import os, signal
from launch.cli.main import main
from sparo_train.core.disk.checkpoint_store import CheckpointStore

whole = CheckpointStore.{method}

def at(self, step, *arguments):
    if step == {step} and os.environ["RANK"] == "{rank}":
        {happens}
    return whole(self, step, *arguments)

CheckpointStore.{method} = at
main()
"""
# Record the images that a rank encodes in evaluations. The sets have fewer images than a part, which one rank encodes.
_COUNTED = """
import os
from pathlib import Path
from evals.encoders.encoder import TwoTowerEncoder as Encoder
from evals.feature_store import features
from launch.cli.main import main

features.part_bounds = lambda count: [(i, i + 1) for i in range(count)]
encode = Encoder.encode

def counted(self, pixels, **options):
    with Path("{folder}", "rank" + os.environ["RANK"]).open("a") as file:
        file.write("." * len(pixels))
    return encode(self, pixels, **options)

Encoder.encode = counted
main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write shards, a recipe for two ranks, and its uninterrupted run with ddp."""
    return with_a_straight_run(tmp_path_factory.mktemp("engines"))


@pytest.mark.long
@pytest.mark.parametrize("engine", [FSDP2, ZERO_3])
def test_a_killed_rank_of_a_sharded_run_loses_nothing(place, tmp_path, engine):
    name = engine.split()[1].strip(",")
    program = _COUNTED.format(folder=tmp_path)
    straight = finish(start_ranks(2, "train", place / "recipe.yaml", f"name={name}", engine, program=program))
    assert [code for code, _ in straight] == [0, 0], straight
    encoded = [len((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert abs(encoded[0] - encoded[1]) < 10 < sum(encoded)
    assert losses(place / name) == pytest.approx(losses(place / "straight"), rel=1e-5)
    evals = [metrics.read(place / n / "metrics.jsonl", "eval")[-1] for n in (name, "straight")]
    assert evals[0]["zero"] == evals[1]["zero"] and evals[0]["step"] == 12
    line = ("train", place / "recipe.yaml", f"name={name}-killed", engine)
    processes = start_ranks(2, *line)
    wait_for_step(place / f"{name}-killed", 5, processes)
    processes[1].kill()
    code, stderr = finish(processes, 60)[0]
    assert code == 0 or (code == 3 and "another rank died" in stderr), stderr
    found = finish(start_ranks(2, *line))
    assert [code for code, _ in found] == [0, 0], found
    assert_bit_equal(place / f"{name}-killed", place / name)


@pytest.mark.long
def test_one_run_continues_with_every_engine(place):
    line = ("train", place / "recipe.yaml", "name=through")
    alone = "engine={kind: local, device: cpu, precision: fp32}"
    for engine, ranks, stop in ((FSDP2, 2, 3), (ZERO_2, 2, 6), (alone, 1, 9), ("engine.timeout=50", 4, 12)):
        found = finish(start_ranks(ranks, *line, engine, f"stop_after_steps={stop}"))
        assert [code for code, _ in found] == [0] * ranks, found
    assert losses(place / "through") == pytest.approx(losses(place / "straight"), rel=1e-4)
    ends = [store.read_meta(place / name / "checkpoints/step-00000012") for name in ("through", "straight")]
    assert ends[0]["cursor"] == ends[1]["cursor"]
    assert ends[0]["recipe"]["optim"]["lr"] == 1e-3 and "torch" in ends[0]["environment"]["packages"]


@pytest.mark.long
@pytest.mark.parametrize(("method", "rank"), [("write", 1), ("complete", 0)])
def test_a_rank_killed_inside_a_save_leaves_the_checkpoint_before(place, method, rank):
    name = f"inside-{method}"
    line = ("train", place / "recipe.yaml", f"name={name}")
    program = _AT.format(method=method, rank=rank, step=6, happens="os.kill(os.getpid(), signal.SIGKILL)")
    found = finish(start_ranks(2, *line, program=program))
    assert found[rank][0] == -9 and found[1 - rank][0] == 3 and "another rank died" in found[1 - rank][1], found
    assert list(store.CheckpointStore(place / name / "checkpoints").steps()) == [3]
    assert list((place / name / "checkpoints").glob(".tmp-*"))
    found = finish(start_ranks(2, *line))
    assert [code for code, _ in found] == [0, 0], found
    assert_bit_equal(place / name, place / "straight")
    assert not list((place / name / "checkpoints").glob(".tmp-*"))


def test_a_full_disk_on_one_rank_ends_all_with_one_message(place):
    line = ("train", place / "recipe.yaml", "name=full")
    happens = "from sparo_train.core.disk import pieces; pieces.write_pieces = lambda *a: open('/dev/full', 'w').write('x' * 9999)"
    found = finish(start_ranks(2, *line, program=_AT.format(method="write", rank=1, step=6, happens=happens)))
    assert [code for code, _ in found] == [2, 2], found
    assert (
        "rank 1: " in found[0][1]
        and "No space left on device" in found[0][1]
        and "step-00000003 is intact" in found[0][1]
    )
    assert "error:" not in found[1][1]
    assert [p.name for p in (place / "full/checkpoints").iterdir()] == ["step-00000003"]
    found = finish(start_ranks(2, *line))
    assert [code for code, _ in found] == [0, 0], found
    assert_bit_equal(place / "full", place / "straight")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _edit(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "samples": 1}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model-00001-of-00002.safetensors", lambda p: p.unlink(), "model-00001-of-00002.safetensors: missing"),
        ("optimizer-00001-of-00002.safetensors", _flip, "optimizer-00001-of-00002.safetensors: damaged"),
        ("index.safetensors", _flip, "index.safetensors: damaged"),
        ("meta.json", _edit, "meta.json: damaged (its checksum differs)"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_left_alone(place, file, damage, message):
    name = f"damaged-{file[:4]}"
    line = ("train", place / "recipe.yaml", f"name={name}", "eval.tasks={}")
    assert [code for code, _ in finish(start_ranks(2, *line, "stop_after_steps=5"))] == [0, 0]
    newest = place / name / "checkpoints/step-00000005"
    damage(newest / file)
    found = finish(start_ranks(2, *line), 60)
    assert [code for code, _ in found] == [2, 2], found
    assert message in found[0][1].replace("\n", "") and f"Remove {newest}" in found[0][1].replace("\n", "")
    assert "error:" not in found[1][1] and len(losses(place / name)) == 5
    assert (place / name / "checkpoints/step-00000003").is_dir()


def test_unsupported_settings_of_an_engine_are_refused(place):
    line = ("train", place / "recipe.yaml", "name=refused")
    found = finish(start_ranks(2, *line, "engine={kind: fsdp2, device: cpu, shard_size: 3}"), 60)
    assert [code for code, _ in found] == [2, 2] and "engine.shard_size=3: does not divide 2 ranks" in found[0][1], (
        found
    )
