"""Situations of an operator: nodes that cannot start a rank, two launches at once, checks, allocations, names in the queue."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.jobs.records import Records
from tests.helpers.processes import start_sparo
from tests.slurm.conftest import ALONE, STEPS

pytestmark = pytest.mark.slurm


@pytest.fixture
def unmounted(whole):
    """Return a cluster whose n2 finds the lab's folder empty."""
    whole.cluster.kill_daemon("n2")
    whole.cluster.start_node("n2", without=whole.root)
    whole.wait(30, lambda: "idle" in whole.cluster.says("sinfo", "-h", "-n", "n2", "-o", "%t"), "n2")
    yield whole
    whole.cluster.kill_daemon("n2")


def test_a_node_that_cannot_see_the_folder_is_named_and_replaced(unmounted):
    begun = time.monotonic()
    folder = unmounted.launch("hidden", "--nodes", "2", "--nodelist", "n1,n2")
    unmounted.cluster.says("scontrol", "update", f"jobid={Records(folder).last_submission()['jobs'][0]}", "nodelist=")
    unmounted.wait(40, lambda: "n2: the run folder is not there" in unmounted.status(folder)[0]["reason"], "the name")
    print(f"named after {time.monotonic() - begun:.1f} s")
    job = Records(folder).last_submission()["jobs"][0]
    # The job may be requeued twice before the controller accepts the exclusion.
    unmounted.wait(90, lambda: "ExcNodeList=n2" in unmounted.cluster.says("scontrol", "show", "job", job), "excluded")
    unmounted.cluster.says("scontrol", "update", f"jobid={job}", "nodelist=")
    unmounted.end(folder)
    unmounted.equal(folder)
    first = unmounted.launch("headless", "--nodelist", "n2", ALONE)  # SLURM cannot open the log on this node
    unmounted.end(first, 30, "FAILED")
    reason = unmounted.status(first)[0]["reason"]
    assert "the first of its nodes (n2) could not write a log" in reason and "--exclude NODE" in reason
    said = unmounted.sparo("launch", "check", "--cluster", "lab", "--nodes", "2", "--nodelist", "n1,n2", code=1)
    assert "n2: FAILED" in said and "the run folder is not there" in said, said


def test_an_interpreter_that_does_not_start_is_shown(whole):
    folder = whole.launch("snake", "--python", "/nowhere/python", ALONE)
    whole.end(folder, 40, "FAILED")  # without a restart, because every node would have the same problem
    status = whole.status(folder)[0]
    assert "failed to import submitit: /nowhere/python: No such file" in status["reason"] and status["restarts"] == 0
    again = whole.sparo("launch", "cancel", str(folder))
    assert "nothing to cancel; job" in again and "has ended (FAILED)" in again


def test_one_of_two_simultaneous_launches_is_accepted(whole):
    env = {name: whole.cluster.env[name] for name in ("SLURM_CONF", "PATH")}
    words = ("launch", "train", "recipe.yaml", "name=twice", "--cluster", "lab", ALONE)
    both = [start_sparo(*words, cwd=whole.root, **env) for _ in range(2)]
    said = [process.communicate(timeout=90) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert sum("there. Run `sparo launch cancel" in err for _, err in said) == 1
    folder = whole.root / "twice"
    assert len(Records(folder).submissions()) == 1
    # A second submission that was recorded nevertheless, as by an older version, is named and cancelled with the first.
    whole.step(folder, 3)
    extra = whole.cluster.says("sbatch", "--parsable", "-p", "main", "--hold", "-o", "/dev/null", "--wrap", "true")
    Records(folder).add("submitted", {**Records(folder).last_submission(), "jobs": [extra]})
    status = whole.status(folder)[0]
    assert status["state"] == "RUNNING" and f"job {extra} of this run is in the queue, too" in status["reason"]
    assert extra in whole.sparo("launch", "cancel", str(folder))
    whole.wait(40, lambda: whole.state(folder) == "CANCELLED", "both are cancelled")
    assert "CANCELLED" in whole.cluster.says("squeue", "-h", "--states=all", "-j", extra, "-o", "%T")


def test_an_allocation_trains_and_starts_again_in_place(whole):
    command = (
        f"sparo launch train recipe.yaml name=inside --cluster allocation --environment.PYTHONPATH {whole.root}/slow"
    )
    words = [*shlex.split(command), "--environment.SPARO_TEST_SLEEP", "0.1", "--environment.OMP_NUM_THREADS", "1"]
    env = {name: whole.cluster.env[name] for name in ("SLURM_CONF",)}
    process = subprocess.Popen(
        ["salloc", "-N2", "--cpus-per-task=1", *words], cwd=whole.root, text=True,
        env={**whole.cluster.env, **env, "PATH": f"{Path(sys.executable).parent}:{whole.cluster.env['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    folder = whole.root / "inside"
    whole.step(folder, 12)
    assert whole.state(folder) == "RUNNING"
    asked = whole.sparo("launch", "save", str(folder))
    assert "for a checkpoint" in asked
    ranks = [pid for pid in whole.cluster._processes("n2") if _is_rank(pid)]
    subprocess.run(["kill", "-9", *map(str, ranks)], check=True)
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and "a rank was lost. The run restarts" in said, said
    whole.equal(folder)
    assert [start[0] for start in whole.starts(folder)] == [0, 1]
    assert whole.state(folder) == "COMPLETED"
    assert f"finished at step {STEPS}" in whole.sparo("launch", "logs", str(folder))
    outside = whole.sparo("launch", "train", "recipe.yaml", "name=outside", "--cluster", "allocation", code=2)
    assert "this shell is not in an allocation of SLURM. Run `salloc" in outside


def _is_rank(pid: int) -> bool:
    try:
        return b"launch.cli.node" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def test_jobs_have_readable_names(whole):
    whole.sparo(
        "launch",
        "eval",
        "one",
        "two",
        "--tasks",
        "zero",
        "--cluster",
        "lab",
        "--name",
        "named",
        "--sbatch.hold",
        "true",
    )
    folder = whole.root / "runs/evals/named"
    job = Records(folder).last_submission()["jobs"][0]
    assert whole.cluster.says("squeue", "-h", "-j", job, "-o", "%j").split()[0] == "eval-one+1-zero"
    whole.sparo("launch", "cancel", str(folder))
    run = whole.launch("plainly", ALONE, "-J", "mine", "--hold")
    assert whole.squeue(run, "%j %r") == "mine JobHeldUser"
    whole.sparo("launch", "cancel", str(run))
