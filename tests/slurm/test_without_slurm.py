"""The same jobs as processes of this machine, by submitit's local executor. They are in this folder because they take equally long."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.jobs.local_jobs import local_alive
from launch.jobs.records import Records
from launch.monitor.logs import LogSource, log_files
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import assert_bit_equal
from tests.helpers.samples import eval_sets
from tests.unit.test_launch import state_of, wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture
def recipe(tmp_path, shards):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in tiny_recipe(shards, tmp_path / "runs").items() if k != "name"}))
    return path


def test_local_jobs_train_like_the_same_command_without_a_launcher(recipe, tmp_path):
    assert sparo("train", str(recipe), "name=straight", OMP_NUM_THREADS="1").returncode == 0
    words = (
        "launch",
        "train",
        str(recipe),
        "name=job",
        "seed=0",
        "optim.lr=[1e-3,5e-4]",
        "--cluster",
        "local",
        "--environment.OMP_NUM_THREADS",
        "1",
    )
    done = sparo(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / f"runs/job-lr{lr}" for lr in ("0.001", "0.0005")]
    assert "is RUNNING" in sparo(*words, cwd=tmp_path).stderr
    wait_for(lambda: "end" not in (Records(folders[0]).starts(_controller(folders[0])) or [{"end": 0}])[-1], 30)
    assert [state_of(f, tmp_path)["state"] for f in folders] == ["RUNNING", "PENDING"]
    wait_for(lambda: not local_alive(_controller(folders[0])))
    assert [state_of(f, tmp_path)["state"] for f in folders] == ["COMPLETED"] * 2
    assert "2 runs: 2 COMPLETED" in sparo("launch", "status", "runs/job", cwd=tmp_path).stdout
    assert_bit_equal(folders[0], tmp_path / "runs/straight")
    assert folders[1].joinpath("code").is_symlink()
    done = sparo("launch", "cancel", str(folders[0]), cwd=tmp_path)
    assert done.returncode == 0 and "nothing to cancel; job" in done.stdout and "has ended (COMPLETED)" in done.stdout
    said = sparo("launch", "logs", str(folders[1]), cwd=tmp_path).stdout
    assert (
        "finished at step 12" in said and "job-lr0.0005" in said and "job-lr0.001" not in said
    )  # the log of one run only
    seen, newest = (
        tmp_path / "seen.txt",
        log_files(folders[1], Records(folders[1]).last_submission(), LogSource(None, 0))[-1],
    )
    command = [sys.executable, "-m", "launch.cli", "launch", "logs", str(folders[1]), "--follow"]
    with seen.open("w") as stream, subprocess.Popen(command, stdout=stream, cwd=tmp_path) as following:
        wait_for(lambda: "finished at step 12" in seen.read_text())
        with newest.open("a") as log:
            log.write("and on\n")
        wait_for(lambda: "and on" in seen.read_text())
        following.terminate()
    assert seen.read_text().count("and on") == 1


def _controller(folder: Path) -> str:
    return Records(folder).last_submission()["jobs"][0]


def test_two_local_ranks_stop_when_cancelled_and_continue(recipe, tmp_path):
    words = (
        "launch",
        "train",
        str(recipe),
        "name=two",
        "steps=4000",
        "checkpoint.every_steps=0",
        "--cluster",
        "local",
        "--tasks-per-node",
        "2",
    )
    done = sparo(*words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "uses engine.kind=ddp instead of local, for 2 ranks" in done.stderr, done.stderr
    folder = tmp_path / "runs/two"
    wait_for(lambda: state_of(folder, tmp_path)["step"] > 3)
    seen = state_of(folder, tmp_path)
    assert seen["state"] == "RUNNING" and seen["total"] == 4000
    assert sparo("launch", "cancel", str(folder), cwd=tmp_path).returncode == 0
    seen = state_of(folder, tmp_path)
    assert seen["state"] == "CANCELLED" and seen["reason"].startswith("cancelled. ") and seen["checkpoint"] > 3
    controller = Records(folder).last_submission()["jobs"][0]
    assert sparo("launch", "resubmit", str(folder), cwd=tmp_path, OMP_NUM_THREADS="1").returncode == 0
    wait_for(lambda: state_of(folder, tmp_path)["step"] > seen["step"])
    again = Records(folder).last_submission()["jobs"][0]
    assert again != controller
    ranks = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _job_of(p) == again]
    for pid in ranks:  # a time limit: saved, and started again by submitit's controller
        os.kill(pid, signal.SIGUSR2)
    wait_for(lambda: sum("end" not in s for s in Records(folder).starts(again)) == 2)
    sparo("launch", "cancel", str(folder), cwd=tmp_path)


def _job_of(process: Path) -> str | None:
    try:
        if "submitit.core._submit" not in (process / "cmdline").read_text():
            return None
        words = (process / "environ").read_text().split("\0")
    except OSError:
        return None
    return next((word.partition("=")[2] for word in words if word.startswith("SUBMITIT_LOCAL_JOB_ID=")), None)


def test_an_evaluation_takes_one_rank_of_a_cluster_of_many(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "runs", steps=3, eval={"tasks": eval_sets(tmp_path / "sets")})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    assert sparo("train", str(tmp_path / "r.yaml")).returncode == 0
    words = (
        "launch",
        "eval",
        "runs/tiny",
        "--tasks",
        "zero,pairs",
        "--cluster",
        "local",
        "--tasks-per-node",
        "2",
        "--name",
        "e",
    )
    done = sparo(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/evals/e"
    wait_for(lambda: (folder / "results.json").exists())
    assert Records(folder).last_submission()["cluster"]["tasks_per_node"] == 1
    assert set(json.loads((folder / "results.json").read_text())["results"]) == {"runs/tiny/zero", "runs/tiny/pairs"}
    wait_for(lambda: state_of(folder, tmp_path)["state"] == "COMPLETED")
    assert "acc1" in sparo(*words, cwd=tmp_path).stdout
