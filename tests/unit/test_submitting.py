"""Jobs launched inside another job, through a pipe, cancelled, or on machines without a GPU; and ranks that do not belong together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from launch.cli.node import perform
from launch.jobs.cluster_files import load_cluster
from launch.jobs.job import GPUS, Element, RestartLimits
from launch.jobs.local_jobs import is_inherited, local_alive
from launch.jobs.records import Records
from launch.jobs.snapshot import take_snapshot
from launch.jobs.submit import submit
from launch.monitor import control
from launch.monitor.control import cancel
from launch.monitor.status import statuses
from sparo_data.writer import write_shards
from sparo_train.core.errors import ConfigError, StoppedError
from tests.helpers.processes import Started
from tests.helpers.ranks import free_port
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample

OUTER = {
    "SLURM_JOB_ID": "77",
    "SLURM_MEM_PER_CPU": "4000",
    "SLURM_CPUS_PER_TASK": "1",
    "SRUN_CPUS_PER_TASK": "1",
    "SUBMITIT_EXECUTOR": "slurm",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_PORT": "1",
    "CUDA_VISIBLE_DEVICES": "0",
}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Write an sbatch that records its environment and its script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "sbatch": f'#!/bin/sh\nenv > {tmp_path}/env.txt\nfor last; do :; done\ncp "$last" {tmp_path}/script.sh\necho Submitted batch job 12\n',
        "srun": "#!/bin/sh\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("count", [1, 2])
def test_a_nested_job_inherits_no_environment(recorded, monkeypatch, count):
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    cluster = load_cluster("slurm", ["--mem-gb", "1"])
    elements = [Element(("train", str(i)), str(recorded / f"run{i}")) for i in range(count)]
    assert submit(cluster, elements, recorded / "jobs", "x", recorded, None, None)
    seen = dict(line.partition("=")[::2] for line in (recorded / "env.txt").read_text().splitlines() if "=" in line)
    assert not OUTER.keys() & seen.keys()
    assert seen["SLURM_CONF"] == "/etc/slurm.conf" and seen["SBATCH_ACCOUNT"] == "mine"
    script = (recorded / "script.sh").read_text()
    assert "wckey" not in script and "--mem=1GB" in script
    assert os.environ["RANK"] == "3"  # only the submitted job lacks it


def test_wckeys_are_sent_and_reserved_arguments_are_refused(recorded):
    cluster = load_cluster("slurm", ["--sbatch.wckey", "project"])
    submit(cluster, [Element(("train",), str(recorded / "run"))], recorded / "jobs", "x", recorded, None, None)
    assert "--wckey=project" in (recorded / "script.sh").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sbatch.signal", "x"], r"sbatch\.signal: sparo sets it itself, got x\. Use --signal-seconds"),
        (["--sbatch.array", "x"], r"sbatch\.array: sparo sets it itself.* Use a sweep"),
        (["--sbatch.open_mode", "x"], r"sbatch\.open_mode: .*logs are appended"),
        (["--sbatch.partition", "x"], r"Use --partition"),
        (["--sbatch.gpus", "2"], r"Use --nodes and --gpus-per-node"),
        (["--sbatch.N", "3"], r"sbatch\.N: is the short form of an argument, got 3"),
        (["--mem-gb", "2", "--sbatch.mem", "4G"], r"sbatch\.mem: memory is given twice, got 4G and --mem-gb 2"),
        (["--mem-gb", "2", "--sbatch.mem-per-cpu", "1G"], r"memory is given twice"),
    ],
)
def test_arguments_of_sbatch_that_sparo_sets_are_refused(recorded, words, message):
    with pytest.raises(ConfigError, match=message):
        submit(load_cluster("slurm", words), [Element((), "x")], recorded / "jobs", "x", recorded, None, None)
    with pytest.raises(ConfigError, match=r"r%j/jobs: contains %, which SLURM replaces in the names of log files"):
        submit(load_cluster("slurm"), [Element((), "x")], recorded / "r%j/jobs", "x", recorded, None, None)


def test_other_arguments_of_sbatch_are_lines_of_the_script(recorded):
    cluster = load_cluster("slurm", ["--sbatch.no-requeue", "true", "--sbatch.gres", "nvme:1", "--sbatch.mem", "4G"])
    submit(cluster, [Element(("train",), str(recorded / "run"))], recorded / "jobs", "x", recorded, None, None)
    script = (recorded / "script.sh").read_text()
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    lines = [line for line in lines if any(word in line for word in ("requeue", "gres", "mem"))]
    assert lines == ["#SBATCH --gres=nvme:1", "#SBATCH --mem=4G", "#SBATCH --no-requeue"]


def test_visible_devices_of_the_user_do_not_reach_jobs():
    assert not is_inherited("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "1"})
    assert is_inherited("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_ID": "7"})


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.long
def test_a_local_launch_closes_its_pipe_and_a_cancelled_job_is_reported(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path, steps=100_000)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    line = f"{sys.executable} -m launch.cli launch train {recipe} --cluster local 2>&1 | cat"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    folder = tmp_path / "tiny"
    assert (folder / "jobs/submitted.jsonl").exists(), done.stdout + done.stderr
    try:
        until(lambda: statuses([folder])[0].step > 0)
        (status,) = statuses([folder])
        assert status.state == "RUNNING"
    finally:
        cancel([folder])
    (status,) = statuses([folder])
    assert status.state == "CANCELLED" and "resubmit" in status.reason and status.rate is None


def test_a_run_gets_signals_at_the_step_of_its_last_start(tmp_path):
    starts = [
        {"job": "12_0", "restart": 0, "time": 1.0, "step_id": "0"},
        {"job": "12_0", "restart": 1, "time": 2.0, "step_id": "1"},
    ]
    starts.append({"job": "13", "restart": 0, "time": 3.0, "step_id": None})  # not started by srun
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    assert [control._step(tmp_path, job) for job in ("12_0", "13", "14")] == ["12_0.1", "13", "14"]


def test_an_older_heartbeat_is_ignored_for_a_new_job(tmp_path):
    records = Records(tmp_path)
    (tmp_path / "heartbeat.json").write_text(json.dumps({"step": 5, "total": 9, "phase": "SIGTERM", "time": 1.0}))
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"kind": "train", "step": 5, "samples": 40, "samples_per_second": 136.0}) + "\n"
    )
    cluster = {"kind": "local", "starter": "srun", "nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0}
    command = [sys.executable, "-c", "import time; time.sleep(60)", "submitit.local._local", str(records.jobs)]
    child = subprocess.Popen(command)
    try:
        records.add(
            "submitted", {"jobs": [str(child.pid)], "on": "local", "cluster": cluster, "logs": str(records.jobs)}
        )
        records.add("starts", {"job": str(child.pid), "restart": 0})
        until(lambda: local_alive(str(child.pid)))  # right after an exec, a process has no command line yet
        (status,) = statuses([tmp_path])
        assert (status.state, status.reason, status.rate, status.step) == ("RUNNING", "", None, 5)
        beat = {"step": 6, "total": 9, "phase": "training", "time": time.time() + 9}
        (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
        record = {
            "kind": "train",
            "step": 6,
            "samples": 48,
            "samples_per_second": 9.0,
            "step_spread": 0.4,
            "slowest_rank": 3.0,
        }
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        assert statuses([tmp_path])[0].reason == "rank 3 is 40% slower than the fastest"
    finally:
        child.send_signal(signal.SIGKILL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_job_with_gpus_does_not_train_on_the_cpu(shards, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(shards, tmp_path, steps=1)))
    monkeypatch.setenv(GPUS, "8")
    assert perform(["train", str(recipe)], str(tmp_path / "tiny"), RestartLimits()) == 2
    assert "the job asked for 8 GPU(s)" in capsys.readouterr().err
    (failure,) = (tmp_path / "tiny/jobs/failures.jsonl").read_text().splitlines()
    assert "--gpus-per-node" in failure


def test_only_the_rank_that_records_an_end_has_an_exit_code_under_srun(tmp_path, monkeypatch):
    stopped, told_by_another = StoppedError("SIGUSR2"), ConfigError("optim.lr: a problem")
    told_by_another.repeated = True
    ends = [(0, stopped, 75), (1, stopped, 0), (0, told_by_another, 0), (1, ConfigError("own"), 2)]
    for rank, error, code in ends:
        monkeypatch.setattr("launch.cli.node.call", lambda *_, error=error: (error.exit_code, error))
        monkeypatch.setattr("launch.cli.node.find_world", lambda rank=rank: SimpleNamespace(rank=rank))
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        assert perform(["train", "recipe.yaml"], str(tmp_path), RestartLimits(idle=99)) == code, (rank, error)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")  # torchrun waits for ranks that fail after one has finished
        assert perform(["train", "recipe.yaml"], str(tmp_path), RestartLimits(idle=99)) == error.exit_code
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")


def ranks_of(recipe, environments, *words):
    """Start `sparo train` once per environment; return exit codes and outputs."""

    def start(own_env, own_words):
        env = {**{k: v for k, v in os.environ.items() if k not in OUTER}, "OMP_NUM_THREADS": "1", **own_env}
        arguments = ("train", str(recipe), *words, *own_words)
        place = Path(own_env.get("PWD", recipe.parent))  # not the checkout, which would precede a rank's own PYTHONPATH
        if "PYTHONPATH" not in own_env:
            return Started(arguments, env, place, None)
        command = [sys.executable, "-m", "launch.cli", *arguments]
        return subprocess.Popen(command, cwd=place, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    started = [start(*each) for each in environments]
    try:
        told = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], told


def torchrun_like(rank, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.long
def test_ranks_with_other_recipes_do_not_train_together(shards, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {**tiny_recipe(shards, tmp_path, steps=4), "engine": {"kind": "ddp", "device": "cpu", "precision": "fp32"}}
        )
    )
    port = free_port()
    codes, told = ranks_of(recipe, [(torchrun_like(0, port), []), (torchrun_like(1, port), ["seed=7", "optim.lr=0.5"])])
    assert codes == [2, 2]
    assert (
        "differs from rank 0 in its recipe or code, got recipe.seed: 0 -> 7" in told[0] and "recipe.optim.lr" in told[0]
    )
    assert sum("Start all ranks" in text for text in told) == 1 and not (tmp_path / "tiny").exists()


@pytest.mark.long
def test_ranks_with_other_code_do_not_train_together(shards, tmp_path):
    recipe = tmp_path / "r.yaml"
    engine = {"kind": "ddp", "device": "cpu", "precision": "fp32"}
    recipe.write_text(yaml.safe_dump({**tiny_recipe(shards, tmp_path, steps=4), "engine": engine}))
    checkout = take_snapshot(tmp_path / "code").path
    with (checkout / "sparo_train" / "core" / "world.py").open("a") as changed:
        changed.write("# one line more\n")
    port = free_port()
    codes, told = ranks_of(
        recipe, [(torchrun_like(0, port), []), ({**torchrun_like(1, port), "PYTHONPATH": str(checkout)}, [])]
    )
    assert codes == [2, 2] and "differs from rank 0 in its recipe or code, got code: '" in told[0]
    assert not (tmp_path / "tiny").exists()


def test_ranks_with_other_data_do_not_train_together(tmp_path):
    recipe, port = tmp_path / "r.yaml", free_port()
    engine = {"kind": "ddp", "device": "cpu", "precision": "fp32"}
    recipe.write_text(yaml.safe_dump({**tiny_recipe("shards", tmp_path, steps=4), "engine": engine}))
    for number in range(2):  # a relative path in another folder on each rank, as on machines without a shared disk
        write_shards(tmp_path / f"node{number}/shards", (sample(i + number) for i in range(32)), 16)
    codes, told = ranks_of(
        recipe, [({**torchrun_like(rank, port), "PWD": str(tmp_path / f"node{rank}")}, []) for rank in range(2)]
    )
    assert codes == [2, 2] and "rank 1: differs from rank 0 in its data" in told[0], told
    assert not (tmp_path / "tiny").exists()


@pytest.mark.long
def test_two_steps_of_one_allocation_do_not_join_each_other(shards, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {**tiny_recipe(shards, tmp_path, steps=4), "engine": {"kind": "ddp", "device": "cpu", "precision": "fp32"}}
        )
    )

    def of_step(step, rank):
        told = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        return {**told, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}, [f"name=step{step}"]

    codes, told = ranks_of(recipe, [of_step(step, rank) for step in (0, 1) for rank in (0, 1)])
    assert codes == [0] * 4, told
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    mixed = [
        ({**of_step(step, rank)[0], **shared}, [f"name=mixed{step}", "engine.join_timeout=8"])
        for step, rank in ((0, 0), (1, 1))
    ]
    codes, told = ranks_of(recipe, mixed)
    assert codes[1] == 2 and "in use by another run (job 77 step 0 restart 0)" in told[1]


@pytest.mark.parametrize("port", ["abc", "99999"])
def test_an_invalid_port_is_named(port, shards, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {**tiny_recipe(shards, tmp_path, steps=1), "engine": {"kind": "ddp", "device": "cpu", "precision": "fp32"}}
        )
    )
    codes, told = ranks_of(recipe, [({**torchrun_like(0, 1), "MASTER_PORT": port}, [])])
    assert codes == [2] and "MASTER_PORT" in told[0] and "Traceback" not in told[0]
