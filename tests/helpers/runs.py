"""Trainings that tests start, kill and compare."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import torch
import yaml

from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.train.run_config import RunConfig
from tests.helpers.processes import start_sparo
from tests.helpers.ranks import free_port
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import eval_sets, sample


def parts(folder: Path, step: int):
    path = folder / "checkpoints" / f"step-{step:08d}"
    return {part: store.read_part(path, part) for part in ("model", "optimizer")}, store.read_meta(path)["cursor"]


def assert_bit_equal(a: Path, b: Path, step: int = 12) -> None:
    (left, cursor), (right, other) = parts(a, step), parts(b, step)
    assert cursor == other
    for part in left:
        assert left[part].keys() == right[part].keys()
        assert all(torch.equal(t, right[part][n]) for n, t in left[part].items()), part
    losses = [
        [(r["step"], r["loss"], r["grad_norm"]) for r in metrics.read(f / "metrics.jsonl", "train")] for f in (a, b)
    ]
    assert losses[0] == losses[1] and [s for s, *_ in losses[0]] == list(range(1, step + 1))


def kill_behind(process, folder: Path, step: int) -> None:
    """Send SIGKILL when the run has logged this step, unless it ends before."""
    while process.poll() is None:
        records = metrics.read(folder / "metrics.jsonl", "train")
        if records and records[-1]["step"] >= step:
            process.kill()
            break
        time.sleep(0.01)
    process.communicate()


def run(tree) -> RunConfig:
    return resolve(RunConfig, tree, "test")


def start_ranks(world_size, *arguments, program=None):
    """Start `sparo …` once per rank, as torchrun would."""
    common = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    own = [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world_size)]
    return [start_sparo(*map(str, arguments), program=program, **env) for env in own]


def finish(processes, seconds=120):
    """Return (exit codes, stderr) by rank; fail if a rank hangs."""
    found = []
    for process in processes:
        try:
            _, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.send_signal(signal.SIGABRT)  # prints where it hangs
            raise AssertionError("hung:\n" + "\n".join(other.communicate(10)[1] for other in processes)) from None
        found.append((process.returncode, stderr))
    return found


def goes_on_across_engines(recipe, folder):
    """Train two ranks with DDP to step 6 and with FSDP2 to step 12; return the losses."""
    for kind, stop in (("ddp", 6), ("fsdp2", 12)):
        engine = f"engine={{kind: {kind}, device: cpu, precision: fp32, timeout: 60}}"
        found = finish(start_ranks(2, "train", recipe, engine, f"stop_after_steps={stop}"))
        assert [code for code, _ in found] == [0, 0], found
    return losses_of(folder)


def losses_of(folder):
    return [record["loss"] for record in metrics.read(folder / "metrics.jsonl", "train")]


def losses(folder):
    return [r["loss"] for r in metrics.read(folder / "metrics.jsonl", "train")]


def wait_for_step(folder, step, processes):
    """Wait until these processes have taken the step. Records of earlier processes do not count."""
    while all(p.poll() is None for p in processes):
        records, beat = metrics.read(folder / "metrics.jsonl", "train"), folder / "heartbeat.json"
        began = beat.exists() and json.loads(beat.read_text())["pid"] == processes[0].pid
        if began and records and records[-1]["step"] >= step:
            return
        time.sleep(0.01)


def with_a_straight_run(root):
    """Write shards, a recipe for two ranks with ddp, and its uninterrupted run `straight`."""
    write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    tree = tiny_recipe(root / "shards", root, eval={"every_steps": 6, "tasks": eval_sets(root / "sets")})
    tree["engine"] = {"kind": "ddp", "device": "cpu", "precision": "fp32", "timeout": 60}
    (root / "recipe.yaml").write_text(yaml.safe_dump(tree))
    found = finish(start_ranks(2, "train", root / "recipe.yaml", "name=straight"))
    assert [code for code, _ in found] == [0, 0], found
    assert "12 steps of 8 samples on 2 ranks" in found[0][1] and "step 12" not in found[1][1]
    return root
