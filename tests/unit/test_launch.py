"""Launching without SLURM: sweeps, snapshots, and submitit's executors for one machine."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from evals.tasks.result import Result
from launch.jobs.cluster_files import load_cluster
from launch.jobs.clusters import ClusterConfig
from launch.jobs.fanout import FanOut
from launch.jobs.local_jobs import end_local, local_alive
from launch.jobs.script import lines_before
from launch.jobs.snapshot import take_snapshot
from launch.jobs.submit import submit
from launch.jobs.sweep import expand
from sparo_data.convert import convert_folder
from sparo_train.core.errors import ConfigError
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import eval_sets, jpeg


@pytest.fixture
def recipe(tmp_path, shards):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in tiny_recipe(shards, tmp_path / "runs").items() if k != "name"}))
    return path


def test_lists_are_swept_where_the_recipe_has_none(recipe):
    name, runs = expand(recipe, ["optim.lr=[1e-3,5e-4]", "objective.mean=[0.1,0.2,0.3]"], 2)
    assert name == "r" and [run.name for run in runs] == [
        "r-lr0.001-seed0", "r-lr0.001-seed1", "r-lr0.0005-seed0", "r-lr0.0005-seed1",
    ]  # fmt: skip
    assert {(run.optim.lr, run.seed) for run in runs} == {(1e-3, 0), (1e-3, 1), (5e-4, 0), (5e-4, 1)}
    assert all(run.objective.mean == (0.1, 0.2, 0.3) for run in runs)
    name, runs = expand(recipe, ["name=x", "objective.model.readout=[{kind: token}, {kind: gap}]"])
    assert [run.name for run in runs] == ["x-readouttoken", "x-readoutgap"]
    assert [run.name for run in expand(recipe, ["steps=5"])[1]] == ["r"]


@pytest.mark.parametrize(
    ("overrides", "seeds", "message"),
    [
        (["optim.lr=[]"], None, "an empty list of values"),
        (["optim.lr=[1e-3,1e-3]"], None, "two runs of the sweep would be called 'r-lr0.001'"),
        (["seed=[1,2]"], 2, "--seeds 2: cannot be combined with seed="),
        ([], 0, "--seeds: must be at least 1, got 0"),
        (["optim.learning=[1,2]"], None, "optim.learning: unknown key"),
        ([], 2000, "2000 runs: more than 1000 in one array"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(recipe, overrides, seeds, message):
    with pytest.raises(ConfigError) as error:
        expand(recipe, overrides, seeds)
    assert message in str(error.value)


def test_a_snapshot_is_the_running_code_and_runs_alone(tmp_path):
    first, second = take_snapshot(tmp_path / "code"), take_snapshot(tmp_path / "code")
    assert first == second and first.commit is not None and len(first.commit) == 40
    assert not list(first.path.rglob("*.pyc")) and (first.path / "configs/clip").is_dir()
    ask = "import launch, sparo_train, evals; print(launch.__file__, sparo_train.__file__, evals.__file__)"
    env = {**os.environ, "PYTHONPATH": str(first.path)}
    out = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    ).stdout
    assert out.count(str(first.path)) == 3
    (tmp_path / "launch").mkdir()  # like a checkout that was edited since
    (tmp_path / "launch/__init__.py").write_text("raise SystemExit('the checkout')")
    path = [
        line.removeprefix("export ")
        for line in lines_before(ClusterConfig(), "python", first.path, tmp_path, tmp_path)
        if line.startswith("export PYTHON")
    ]
    env = {**os.environ, **dict(line.replace("${PYTHONPATH:+:$PYTHONPATH}", "").split("=", 1) for line in path)}
    subprocess.run([sys.executable, "-m", "launch.jobs.submit"], env=env, cwd=tmp_path, check=True)
    assert (tmp_path / f"code/{first.path.name}.commit").read_text().strip() == first.commit


def test_simultaneous_snapshots_are_shared(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(take_snapshot, [tmp_path / "code"] * 4))
    assert len(set(found)) == 1 and (found[0].path / "launch/jobs/job.py").is_file()
    assert not [path for path in (tmp_path / "code").iterdir() if path.name.startswith(".")]
    assert found[0].path.stat().st_mode == (tmp_path / "code").stat().st_mode


def test_launching_without_submitit_names_the_package(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(
        ConfigError, match=r"sparo launch needs submitit. Run `pip install -e '\.\[slurm\]'` in sparo's checkout"
    ):
        submit(load_cluster("local"), [], tmp_path, "x", tmp_path, None, None)


def test_the_debug_cluster_runs_in_this_process_and_returns_its_code(recipe, tmp_path):
    done = sparo("launch", "train", str(recipe), "name=here", "--cluster", "debug", cwd=tmp_path)
    assert done.returncode == 0 and "finished at step 12" in done.stderr, done.stderr
    assert state_of(tmp_path / "runs/here", tmp_path)["state"] == "COMPLETED"
    bad = ("launch", "train", str(recipe), "name=bad", "data.sources.a.shards=/nowhere", "--cluster", "debug")
    done = sparo(*bad, cwd=tmp_path)
    assert done.returncode == 2 and "/nowhere" in done.stderr and "Traceback" not in done.stderr
    seen = state_of(tmp_path / "runs/bad", tmp_path)
    assert seen["state"] == "FAILED" and "/nowhere" in seen["reason"]


def test_a_conversion_that_cannot_be_divided_is_not_launched(tmp_path):
    words = ("launch", "data", "convert", "in", "out", "--to", "mds", "--parts", "2", "--cluster", "debug")
    done = sparo(*words, cwd=tmp_path)
    assert done.returncode == 2 and "--to mds: one process writes the whole data set" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_local_evaluations_fan_out_and_merge(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path / "runs", steps=3, eval={"tasks": eval_sets(tmp_path / "sets")})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    assert sparo("train", str(tmp_path / "r.yaml")).returncode == 0
    words = ("launch", "eval", "runs/tiny", "--tasks", "zero", "--cluster", "debug", "--name", "e")
    done = sparo(*words, cwd=tmp_path)
    assert done.returncode == 0 and "acc1" in done.stdout, done.stderr
    assert not FanOut(tmp_path / "runs/evals/e").missing_elements()
    results = json.loads((tmp_path / "runs/evals/e/results.json").read_text())["results"]
    assert list(results) == ["runs/tiny/zero"]
    assert "was scored before" not in done.stdout and not FanOut(tmp_path / "runs/evals/e").outdated()
    later = time.time() + 60
    os.utime(tmp_path / "runs/tiny/checkpoints/step-00000003", (later, later))
    done = sparo(*words, cwd=tmp_path)
    assert done.returncode == 0 and "acc1" in done.stdout
    assert "runs/tiny: was scored before step-00000003 was written. Use another --name to score it again" in done.stdout
    with pytest.raises(ConfigError, match=r"contains another plan. Give another --name"):
        FanOut.make(tmp_path / "runs/evals/e", "eval", [])
    done = sparo("launch", "eval", "runs", "--cluster", "debug", cwd=tmp_path)
    assert done.returncode == 2 and "runs: is a folder of runs, not a run. Give runs/tiny." in done.stderr


def test_tasks_with_slashes_and_checkpoints_of_one_name_have_results_of_their_own(tmp_path):
    elements = [
        {"checkpoint": f"{run}/export", "task": task, "arguments": []} for run in "ab" for task in ("x/t", "y/t")
    ]
    fan = FanOut.make(tmp_path / "fan", "eval", elements)
    (tmp_path / "fan/parts").mkdir()
    for number, element in enumerate(elements):
        result = Result("knn", 9, "acc1", {"acc1": number / 10}, 0.1).as_dict()
        fan.part(number).write_text(json.dumps({"results": {f"export/{element['task']}": result}}))
    found = {(run, task): r.value for run, by_task in fan.results().items() for task, r in by_task.items()}
    assert found == {
        ("a/export", "x/t"): 0.0,
        ("a/export", "y/t"): 0.1,
        ("b/export", "x/t"): 0.2,
        ("b/export", "y/t"): 0.3,
    }


def test_parts_of_a_conversion_are_the_whole(tmp_path):
    for i in range(11):
        path = tmp_path / "images" / "cat" / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    convert_folder(tmp_path / "images", tmp_path / "whole", per_shard=2)
    counts = [
        convert_folder(tmp_path / "images", tmp_path / "parts", per_shard=2, part=(i, 4)).train for i in (2, 0, 3, 1, 0)
    ]
    whole, parts = ({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.tar")} for name in ("whole", "parts"))
    assert whole == parts and sum(counts[:4]) == 11
    with pytest.raises(Exception, match="contains 6 shard"):
        convert_folder(tmp_path / "images", tmp_path / "parts", per_shard=3, part=(0, 4))
    done = sparo("data", "convert", "images", "x", "--part", "4/4", cwd=tmp_path)
    assert done.returncode == 2 and "expected I/N, such as 0/4, with I from 0 to N-1" in done.stderr


def test_invalid_sweeps_are_refused_before_anything_is_submitted(recipe, tmp_path):
    done = sparo("launch", "train", str(recipe), "name=x", "--cluster", "local", "--tasks-per-node", "3", cwd=tmp_path)
    assert done.returncode == 2 and "3 ranks cannot share it evenly" in done.stderr
    done = sparo("launch", "train", str(recipe), "name=x", "world_size=4", "--cluster", "local", cwd=tmp_path)
    assert done.returncode == 2 and "got 1 rank(s) (1 node(s) with 1 each)" in done.stderr
    done = sparo("launch", "train", str(recipe), "name=x", "freeze=['model.*']", "--cluster", "local", cwd=tmp_path)
    assert done.returncode == 2 and "objective: no parameter is trainable" in done.stderr
    assert not (tmp_path / "runs/x").exists()
    assert ClusterConfig().ranks == 1


def test_a_local_job_that_does_not_end_is_killed_with_its_ranks():
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    rank = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf + rank, "submitit.local._local"]) as job:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        wait_for(lambda: local_alive(str(job.pid)) and children.read_text().split(), 20)
        (child,) = children.read_text().split()
        end_local(str(job.pid), 0.5)
        assert job.wait(10) == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text(), 10)


def state_of(folder: Path, cwd: Path) -> dict:
    done = sparo("launch", "status", str(folder), "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


def wait_for(ready, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.2)
