"""Two ranks in separate processes: equal to one, killed, stopped, continued with more or fewer ranks, and never silent."""

import json
import os
import random
import signal
import time
from collections import Counter

import pytest
import yaml

from launch.commands.train import train
from sparo_data.writer import write_shard
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.core.disk.metrics import straggler
from sparo_train.core.errors import ConfigError
from sparo_train.core.world import World, find_world
from sparo_train.train.run_config import RunConfig
from tests.helpers.processes import sparo
from tests.helpers.runs import assert_bit_equal, finish, losses, start_ranks, wait_for_step, with_a_straight_run
from tests.helpers.samples import sample

_RANK_ONE_IS_SLOW = """
import os, time
from launch.cli.main import main
from sparo_train.objectives.clip import ClipObjective

whole = ClipObjective.embed

def embed(self, batch):
    time.sleep(0.5 * int(os.environ["RANK"]))
    return whole(self, batch)

ClipObjective.embed = embed
main()
"""
_RANK_ONE_FAILS = """
import os
from launch.cli.main import main
from sparo_train.core.errors import DataError
from sparo_train.data.read.loader import Pipeline

whole = Pipeline.example

def example(self, ref, *on_stage):
    if os.environ["RANK"] == "1" and ref.ordinal == 17:
        raise DataError("x.tar: the disk is gone")
    return whole(self, ref)

Pipeline.example = example
main()
"""
# Its engine has two devices of another kind.
_RANK_ONE_HAS_AN_XPU = """
import os
import torch
from launch.cli.main import main
from sparo_train.engine import device_context

if os.environ["RANK"] == "1":
    device_context.find_device = lambda *_: torch.device("xpu")
    torch.accelerator.device_count = lambda: 2
main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write shards, a recipe for two ranks, and its uninterrupted run."""
    return with_a_straight_run(tmp_path_factory.mktemp("ranks"))


def test_two_ranks_train_as_one_process(place):
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    train(resolve(RunConfig, {**tree, "name": "alone"}, "x"))
    assert losses(place / "alone") == pytest.approx(losses(place / "straight"), rel=1e-5)
    records = [metrics.read(place / name / "metrics.jsonl") for name in ("alone", "straight")]
    assert [r["step"] for r in records[1] if r["kind"] == "eval"] == [6, 12]
    assert records[1][-2]["step_spread"] >= 0 and "step_spread" not in records[0][-2]
    for old, new in zip(*([r for r in found if r["kind"] == "train"] for found in records), strict=True):
        assert old["grad_norm"] == pytest.approx(new["grad_norm"], rel=1e-4)


def test_micro_batches_on_two_ranks_change_nothing(place):
    found = finish(start_ranks(2, "train", place / "recipe.yaml", "name=micro", "micro_batch_size=2", "steps=6"))
    assert [code for code, _ in found] == [0, 0], found
    assert losses(place / "micro")[:2] == pytest.approx(losses(place / "straight")[:2], rel=1e-5)


@pytest.mark.parametrize(("rank", "micro"), [(0, 4), (1, 4), (1, 2)])
def test_a_killed_rank_ends_the_others_and_the_same_command_loses_nothing(place, rank, micro):
    line = ("train", place / "recipe.yaml", f"name=killed{rank}{micro}", f"micro_batch_size={micro}")
    folder = place / f"killed{rank}{micro}"
    processes = start_ranks(2, *line)
    wait_for_step(folder, 4 + rank, processes)
    processes[rank].kill()
    found = finish(processes, 60)
    code, stderr = found[1 - rank]
    if code == 0:
        pytest.skip("the run finished before the kill")
    assert code == 3 and f"rank {1 - rank} of 2: " in stderr and "another rank died" in stderr, stderr
    found = finish(start_ranks(2, *line))
    assert [code for code, _ in found] == [0, 0], found
    if micro == 4:  # the whole batch of a rank
        assert_bit_equal(folder, place / "straight")
    else:
        assert losses(folder) == pytest.approx(losses(place / "straight"), rel=1e-4)


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_with_one_checkpoint(place):
    line = ("train", place / "recipe.yaml", "name=stopped", "checkpoint.every_steps=0")
    processes = start_ranks(2, *line)
    wait_for_step(place / "stopped", 2, processes)
    processes[1].send_signal(signal.SIGUSR2)
    found = finish(processes)
    if found[0][0] == 0:
        pytest.skip("the run finished before the signal")
    assert [code for code, _ in found] == [75, 75], found
    assert json.loads((place / "stopped/heartbeat.json").read_text())["phase"] == "SIGUSR2"
    found = finish(start_ranks(2, *line))
    assert [code for code, _ in found] == [0, 0], found
    assert_bit_equal(place / "stopped", place / "straight")


@pytest.mark.long
def test_a_run_resumes_with_another_world_size(place):
    tree = {**yaml.safe_load((place / "recipe.yaml").read_text()), "name": "elastic"}
    first = finish(start_ranks(2, "train", place / "recipe.yaml", "name=elastic", "stop_after_steps=5"))
    assert [code for code, _ in first] == [0, 0], first
    train(resolve(RunConfig, {**tree, "stop_after_steps": 8}, "x"))
    last = finish(start_ranks(4, "train", place / "recipe.yaml", "name=elastic"))
    assert [code for code, _ in last] == [0] * 4, last
    assert losses(place / "elastic") == pytest.approx(losses(place / "straight"), rel=1e-4)
    ends = [store.read_meta(place / name / "checkpoints/step-00000012") for name in ("elastic", "straight")]
    assert ends[0]["cursor"] == ends[1]["cursor"] and ends[0]["samples"] == 96


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine={kind: local}", "engine.kind=local runs in one process, got 2. Use engine.kind=ddp"),
        ("world_size=4", "world_size=4: 2 rank(s) were started"),
        ("optim.lr=5", "contains a run of another recipe"),
    ],
)
def test_invalid_runs_are_refused_by_all_ranks_at_once(place, override, message):
    found = finish(start_ranks(2, "train", place / "recipe.yaml", "name=straight", override), 60)
    assert [code for code, _ in found] == [2, 2] and message in found[0][1], found


def test_a_node_that_lost_its_gpus_is_named(place):
    found = finish(start_ranks(2, "train", place / "recipe.yaml", "name=gpus", program=_RANK_ONE_HAS_AN_XPU), 60)
    assert [code for code, _ in found] == [2, 2], found
    assert "rank 1: differs from rank 0 in its device, got engine.device: 'cpu' -> 'xpu'" in found[0][1]
    assert "Repair that node, or exclude it." in found[0][1] and "error:" not in found[1][1]
    assert not (place / "gpus").exists()


def test_an_error_on_one_rank_stops_all_and_is_reported_once(place):
    line = ("train", place / "recipe.yaml", "name=trouble", "checkpoint.every_steps=0", "data.prefetch=1")
    found = finish(start_ranks(2, *line, program=_RANK_ONE_FAILS), 60)
    assert [code for code, _ in found] == [2, 2], found
    assert "error: rank 1: x.tar: the disk is gone" in found[0][1] and "error:" not in found[1][1]
    kept = store.CheckpointStore(place / "trouble/checkpoints").latest()
    assert (store.read_meta(kept)["step"] if kept else 0) == len(losses(place / "trouble"))  # no saved step is lost
    found = finish(start_ranks(2, *line))
    assert [code for code, _ in found] == [0, 0], found
    assert_bit_equal(place / "trouble", place / "straight")


def test_bad_samples_of_all_ranks_are_judged_together(place):
    good = [sample(i) for i in range(48)]
    write_shard(place / "bad/0.tar", ((k, {**f, "jpg": b"x"} if i % 8 == 0 else f) for i, (k, f) in enumerate(good)))
    line = (
        "train",
        place / "recipe.yaml",
        "name=bad",
        f"data.sources.a.shards={place}/bad",
        "data.max_bad_share_min_samples=16",
    )
    found = finish(start_ranks(2, *line), 60)
    assert [code for code, _ in found] == [2, 2], found
    assert "were unusable, more than data.max_bad_share=0.01" in found[0][1] and "error:" not in found[1][1]


def test_skips_are_counted_once_although_a_signal_came_between(place):
    line = ("train", place / "recipe.yaml", f"data.sources.a.shards={place}/bad", "data.max_bad_share=1.0")
    line = (*line, "checkpoint.every_steps=0", "eval.tasks={}")
    finish(start_ranks(2, *line, "name=skips"), 60)
    processes = start_ranks(2, *line, "name=cut")
    wait_for_step(place / "cut", 3, processes)
    processes[0].send_signal(signal.SIGTERM)
    if finish(processes)[0][0] == 0:
        pytest.skip("the run finished before the signal")
    finish(start_ranks(2, *line, "name=cut"))
    ends = [metrics.read(place / name / "metrics.jsonl", "train")[-1]["bad_samples"] for name in ("skips", "cut")]
    assert ends[0] == ends[1] and ends[0]["bad image"] > 0


def test_a_slow_rank_shows_in_the_spread(place):
    line = ("train", place / "recipe.yaml", "name=slow", "steps=4")
    found = finish(start_ranks(2, *line, program=_RANK_ONE_IS_SLOW), 60)
    assert [code for code, _ in found] == [0, 0], found
    record = metrics.read(place / "slow/metrics.jsonl", "train")[-1]
    assert record["step_spread"] > 1 and record["slowest_rank"] == 1
    assert straggler(record).startswith("rank 1 is ")


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["{kind: ddp}", "{kind: fsdp2}", "{kind: deepspeed, stage: 2}"])
def test_fifty_random_kills_lose_nothing(place, engine):
    """A random rank dies at a random step, or during a save. Every start continues the run."""
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    tree |= {"steps": 120, "eval": {"tasks": {}}, "checkpoint": {"every_steps": 2}}
    tree["engine"] = {"device": "cpu", "precision": "fp32", "timeout": 60, **yaml.safe_load(engine)}
    kind = tree["engine"]["kind"]
    (place / "long.yaml").write_text(yaml.safe_dump(tree))
    assert [c for c, _ in finish(start_ranks(2, "train", place / "long.yaml", f"name=long-{kind}"))] == [0, 0]
    rng = random.Random(int(os.environ.get("SPARO_TEST_SEED", "0")))
    folder, counts, at = place / f"shot-{kind}", Counter(), 0
    for number in range(50):
        processes = start_ranks(2, "train", place / "long.yaml", f"name={folder.name}", "stop_after_steps=119")
        rank, inside_save = rng.randrange(2), number % 2 == 1
        wait_for_step(folder, min(118, at + rng.randrange(1, 5)), processes)
        while inside_save and all(p.poll() is None for p in processes) and not list(folder.glob("checkpoints/.tmp-*")):
            time.sleep(0.0005)
        processes[rank].kill()
        codes = [code for code, _ in finish(processes, 90)]
        counts[rank, "inside a save" if inside_save else "at a step", codes[1 - rank]] += 1
        kept = store.CheckpointStore(folder / "checkpoints").latest()
        at = store.read_meta(kept)["step"] if kept else 0
    done = finish(start_ranks(2, "train", place / "long.yaml", f"name={folder.name}"))
    assert [code for code, _ in done] == [0, 0], done
    print(
        "\n".join(
            f"{kind}: rank {r} killed {how}: {n} times, the other ended with {c}" for (r, how, c), n in counts.items()
        )
    )
    assert_bit_equal(folder, place / f"long-{kind}", 120)


def test_the_world_is_read_from_the_environment():
    assert find_world({}) == World(0, 1, 0)
    assert find_world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == World(3, 4, 1)
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    assert find_world(slurm) == World(5, 8, 1)
    assert find_world({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) == World(0, 1, 0)
    done = sparo("version", WORLD_SIZE="2")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    with pytest.raises(
        ConfigError, match=r"RANK is not set, although WORLD_SIZE is\. Start with torchrun, srun or mpirun"
    ):
        find_world({"WORLD_SIZE": "2"})
