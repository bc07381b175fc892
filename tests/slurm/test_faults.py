"""Faults of clusters: daemons, nodes, the controller, refusals. The run ends as if nothing had happened, or reports the reason."""

import json
import os
import time
from pathlib import Path

import pytest

from launch.jobs import slurm
from launch.jobs.records import Records
from tests.helpers.processes import sparo, start_sparo
from tests.slurm.conftest import ALONE

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module", autouse=True)
def counted(accounted):
    """On the cluster with accounting, kill a daemon during a run, while the other tests continue."""
    folder = accounted.launch("counted", "--nodes", "2", "--environment.SPARO_TEST_SLEEP", "0.8", "--account", "lab")
    accounted.step(folder, 3)
    accounted.cluster.kill_daemon("n2")
    return folder


def test_a_node_that_is_lost_is_replaced(whole):
    folder = whole.launch("lost", "--nodes", "2")
    whole.step(folder, 12)
    whole.cluster.kill_node("n2")
    whole.end(folder, 120)
    whole.equal(folder)
    (first, _, end), (second, step, _) = whole.starts(folder)[0], whole.starts(folder)[-1]
    assert (first, second) == (0, 1) and step >= 10 and (end.startswith("LostRankError") or not end)
    used = whole.cluster.says("scontrol", "show", "hostnames", whole.status(folder)[0]["nodes"]).split()
    assert len(used) == 2 and "n2" not in used


@pytest.mark.slow  # with accounting, see test_a_daemon_killed_in_mid_job_with_accounting
def test_a_killed_daemon_costs_only_a_restart(whole):
    folder = whole.launch("deaf", "--nodes", "2", "--environment.SPARO_TEST_SLEEP", "0.8")
    whole.step(folder, 3)
    whole.cluster.kill_daemon("n2")  # its rank continues; the controller gives the node up
    whole.wait(60, lambda: whole.squeue(folder, "%T %r") != "RUNNING None", "given up")
    assert whole.state(folder) != "FAILED"
    whole.end(folder, 120)
    whole.equal(folder)


def test_processes_of_a_returning_node_write_nothing(whole):
    folder = whole.launch("split", "--nodelist", "n1", ALONE)
    whole.step(folder, 12)
    frozen = whole.cluster.freeze_node("n1")
    whole.cluster.says("scontrol", "update", "nodename=n1", "state=down", "reason=cut")
    try:
        record = Records(folder).last_submission()
        whole.cluster.says("scontrol", "update", f"jobid={record['jobs'][0]}", "nodelist=n2")
        whole.wait(
            120,
            lambda: (
                (folder / "owner.json").exists() and json.loads((folder / "owner.json").read_text())["restart"] == 1
            ),
            "a successor",
        )
        whole.step(folder, 25)
        before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.name.startswith("step-")}
        whole.cluster.thaw(frozen)
        gone = time.monotonic() + 60
        tasks = [pid for pid in frozen if "launch" in _command(pid) or "submitit" in _command(pid)]
        assert tasks
        while any(_command(pid) for pid in tasks):
            assert time.monotonic() < gone, "the cut-off rank goes on"
            time.sleep(0.1)
        assert all(path.stat().st_mtime_ns == at for path, at in before.items() if path.exists())
    finally:
        whole.cluster.thaw(frozen)
    whole.end(folder, 120)
    whole.equal(folder, "one")
    # The returning srun cancels the step with its number, which belongs to its successor. This costs one more start.
    assert [start[0] for start in whole.starts(folder)] in ([0, 1], [0, 1, 2])
    errors = "".join(path.read_text() for path in (folder / "jobs").glob("*_0_log.err"))
    assert (
        "was taken over by a process that started later" in errors
        and "was taken over" not in (folder / "log.txt").read_text()
    )


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_draining_node_finishes_its_job_and_takes_no_other(whole):
    folder = whole.launch("drained", "--nodelist", "n1", ALONE)
    whole.step(folder, 5)
    whole.cluster.says("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    waiting = whole.launch("waiting", "--nodelist", "n1", ALONE)
    whole.wait(20, lambda: "ReqNodeNotAvail" in whole.status(waiting)[0]["reason"], "the reason")
    seen = whole.status(waiting)[0]
    assert seen["state"] == "PENDING" and "drained, down or reserved" in seen["reason"]
    whole.end(folder)
    whole.equal(folder, "one")
    whole.sparo("launch", "cancel", str(waiting))
    whole.end(waiting, 20, "CANCELLED")


def test_a_controller_outage_is_survived(whole):
    folder = whole.launch("orphaned", ALONE)
    whole.step(folder, 5)
    whole.cluster.stop_controller()
    seen = whole.status(folder)[0]
    assert seen["state"] == "UNKNOWN" and "controller does not answer" in seen["reason"] and seen["step"] >= 5
    env = {name: whole.cluster.env[name] for name in ("SLURM_CONF", "PATH")}
    process = start_sparo(
        "launch", "train", "recipe.yaml", "name=late", "--cluster", "lab", ALONE, cwd=whole.root, **env
    )
    whole.wait(60, lambda: "trying again" in process.stderr_now(), "patience")
    assert Records(whole.root / "late").last_submission() is None
    whole.cluster.start_controller()
    _, err = process.communicate(60)
    assert process.returncode == 0, err
    for name in ("orphaned", "late"):
        whole.end(whole.root / name)
        whole.equal(whole.root / name, "one")
    assert len(list((whole.root / "late/jobs").glob("*.pkl"))) == 1  # the attempts leave no files


def test_a_refused_launch_leaves_a_folder_that_can_be_launched(whole):
    said = whole.sparo(
        "launch", "train", "recipe.yaml", "name=refused", "--cluster", "lab", "--partition", "nope", ALONE, code=2
    )
    assert "sbatch refused the job (invalid partition specified: nope" in said, said
    assert "known partitions: main, high" in said
    assert Records(whole.root / "refused").last_submission() is None and not list(
        (whole.root / "refused/jobs").iterdir()
    )
    gpus = ("--gpus-per-node", "8", "--tasks-per-node", "1")
    said = whole.sparo("launch", "train", "recipe.yaml", "name=refused", "--cluster", "lab", *gpus, ALONE, code=2)
    assert "--gpus-per-node: this partition has no such GPUs" in said
    folder = whole.launch("refused", ALONE)
    whole.end(folder)
    whole.equal(folder, "one")


def test_a_job_that_can_never_start_is_reported(whole):
    folder = whole.launch("long", "--time", "2-00:00:00", ALONE)
    whole.wait(20, lambda: "PartitionTimeLimit" in whole.status(folder)[0]["reason"], "the reason")
    assert "--time is longer than the partition allows" in whole.status(folder)[0]["reason"]
    whole.sparo("launch", "cancel", str(folder))
    whole.end(folder, 20, "CANCELLED")
    dependent = whole.sparo(
        "launch", "train", "recipe.yaml", "name=next", "--cluster", "lab", "--after", str(folder), ALONE, code=2
    )
    assert "ended as CANCELLED. Run `sparo launch resubmit" in dependent


def test_without_slurm(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "batch_size: 8\nsteps: 1\noptim: {warmup_steps: 0}\ndata: {sources: {a: {shards: x}}}\n"
    )
    done = sparo(
        "launch", "train", "r.yaml", "--cluster", "slurm", "--gpus-per-node", "0", cwd=tmp_path, PATH="/nowhere"
    )
    assert done.returncode == 2 and "srun: not found on this machine" in done.stderr, done.stderr
    done = sparo("launch", "status", "runs/r", cwd=tmp_path, PATH=os.environ["PATH"])
    assert done.returncode == 2 and "runs/r: no job was submitted there" in done.stderr


def test_a_daemon_killed_in_mid_job_with_accounting(accounted, counted, monkeypatch):
    accounted.end(counted)
    accounted.equal(counted)
    assert accounted.status(counted)[0]["restarts"] == 1
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, accounted.cluster.env[name])
    job = Records(counted).last_submission()["jobs"][0]
    assert slurm._accounting_states([job, "99"])[job].state == "COMPLETED"  # as if the controller had forgotten the job
    said = accounted.sparo(
        "launch", "train", "recipe.yaml", "name=x", ALONE, "--cluster", "lab", "--account", "nobody", code=2
    )
    assert "--account (or --partition, --qos) is not yours" in said
