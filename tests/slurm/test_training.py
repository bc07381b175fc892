"""Training on a real SLURM: undisturbed, preempted, out of time, cancelled. The losses are always the same."""

import itertools
import json
import shlex
import sys
import time

import pytest

from launch.jobs.records import Records
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from tests.slurm.conftest import ALONE, STEPS

pytestmark = pytest.mark.slurm
ASIDE = ("--nodes", "2", "--nodelist", "n3,n4")  # for long runs in parallel with the other tests, which use n1 and n2
HERE = ("--nodes", "2", "--nodelist", "n1,n2")


@pytest.fixture(scope="module", autouse=True)
def limited(lab):
    # Two minutes until the signal, more than a start takes on a busy machine, and less than 40 steps of three seconds.
    limit = ("--time", "3", "--signal-seconds", "60", "--environment.SPARO_TEST_SLEEP", "3.0")
    return lab.launch("limited", *ASIDE, *limit, "checkpoint.every_steps=0")


@pytest.fixture(scope="module", autouse=True)
def loop(lab, limited):
    words = ("--idle-restarts", "1", "--environment.SPARO_TEST_DIES", "1", "checkpoint.every_steps=0")
    return lab.launch("loop", *ASIDE, *words)


def test_two_nodes_train_like_two_ranks(lab):
    folder = lab.launch("plain", *HERE)
    with_code = Records(folder).last_submission()
    assert (folder / "config.yaml").exists() and len(with_code["code"].rpartition("/")[2]) == 12
    assert "name=plain" in (folder / "command.txt").read_text() and len(with_code["commit"]) == 40
    refused = lab.sparo("launch", "train", "recipe.yaml", "name=plain", "--cluster", "lab", "--nodes", "2", code=2)
    assert "there. Run `sparo launch cancel" in refused  # one job at a time
    lab.step(folder, 5)
    seen = lab.status(folder)[0]
    assert seen["state"] == "RUNNING" and seen["nodes"] == "n[1-2]" and seen["total"] == STEPS and seen["eta"] > 0
    lab.end(folder)
    lab.equal(folder)
    assert lab.status(folder)[0] | {"job": "", "metric": "", "start": ""} == {
        "folder": str(folder), "job": "", "on": "lab", "state": "COMPLETED", "nodes": "n[1-2]", "step": STEPS, "total": STEPS,
        "rate": None, "eta": None, "checkpoint": STEPS, "restarts": 0, "reason": "", "metric": "", "start": "", "answered": True,
    }  # fmt: skip
    assert f"finished at step {STEPS}" in lab.sparo("launch", "logs", str(folder))
    changed = lab.sparo(
        "launch", "train", "recipe.yaml", "name=plain", "optim.lr=5", "--cluster", "lab", "--nodes", "2", code=2
    )
    assert "optim.lr: 0.001 -> 5" in changed


def test_a_higher_partition_preempts_and_nothing_is_lost(lab):
    folder = lab.launch("preempted", *HERE, "checkpoint.every_steps=0")
    lab.step(folder, 5)
    begun = time.monotonic()
    lab.cluster.says("sbatch", "-p", "high", "--exclusive", "-w", "n1", "-o", "/dev/null", "--wrap", "sleep 2")
    lab.wait(20, lambda: lab.squeue(folder) in ("PENDING", "COMPLETING"), "saved and requeued")
    print(f"pre-emption to requeued: {time.monotonic() - begun:.1f} s")
    lab.end(folder)
    lab.equal(folder)
    first, second = lab.starts(folder)
    assert first[2] == "SIGUSR2" and second[1] >= 5 and second[2] == "finished"
    assert lab.status(folder)[0]["restarts"] == 1
    text = (folder / "log.txt").read_text()
    assert f"SIGUSR2 at step {second[1]}" in text and f"step-{second[1]:08d} (step {second[1]} of {STEPS})" in text


def test_one_torchrun_per_node_is_requeued_by_a_signal(lab):
    words = (*HERE, "--tasks-per-node", "1", "--starter", "torchrun", "checkpoint.every_steps=0")
    folder = lab.launch("torchrun", *words)
    lab.step(folder, 5)
    lab.cluster.says("scancel", "--signal=USR2", Records(folder).last_submission()["jobs"][0])
    lab.end(folder)
    lab.equal(folder)
    assert [end for *_, end in lab.starts(folder)] == ["SIGUSR2", "finished"]


def test_a_signal_before_the_first_step_costs_a_restart(lab):
    folder = lab.launch("early", "--nodelist", "n1", ALONE)
    job = Records(folder).last_submission()["jobs"][0]
    lab.wait(
        30, (folder / f"jobs/.{job}-0.started").exists, "a rank"
    )  # handles signals already, and still imports torch
    lab.cluster.says("scancel", "--signal=USR2", job)
    lab.end(folder)
    lab.equal(folder, "one")
    assert "Restarts=1 " in lab.cluster.says("scontrol", "show", "job", "-o", job)


def test_a_cancelled_run_is_saved_and_resubmitted(lab):
    folder = lab.launch("cancelled", *HERE, "checkpoint.every_steps=0")
    lab.step(folder, 5)
    assert "cancelled" in lab.sparo("launch", "cancel", str(folder))
    lab.end(folder, 30, "CANCELLED")
    assert lab.state(folder) == "CANCELLED"
    time.sleep(3)
    assert lab.squeue(folder) == "CANCELLED"  # the batch script did not requeue it
    kept = store.CheckpointStore(folder / "checkpoints").latest()
    assert kept is not None and store.read_meta(kept)["step"] >= 5
    lab.sparo("launch", "resubmit", str(folder), "--time", "20")
    assert Records(folder).last_submission()["cluster"]["time"] == 20
    lab.end(folder)
    lab.equal(folder)


def test_lists_and_seeds_make_one_array(lab):
    slow = ("--environment.SPARO_TEST_SLEEP", "0.4")  # SLURM may need seconds to deliver a signal
    words = ("optim.lr=[1e-3,5e-4]", "--seeds", "2", "--parallel", "2", *slow, ALONE)
    out = lab.sparo("launch", "train", "recipe.yaml", "name=sweep", *words, "--cluster", "lab")
    names = ["sweep-lr0.001-seed0", "sweep-lr0.001-seed1", "sweep-lr0.0005-seed0", "sweep-lr0.0005-seed1"]
    folders = [lab.root / name for name in names]
    assert all(folder.name in out for folder in folders)
    jobs = [Records(folder).last_submission()["jobs"][0] for folder in folders]
    assert [job.partition("_")[2] for job in jobs] == ["0", "1", "2", "3"] and len(
        {j.partition("_")[0] for j in jobs}
    ) == 1
    assert {s["state"] for s in lab.status(*folders)} <= {"PENDING", "RUNNING"}
    lab.wait(60, lambda: sum(s["state"] == "RUNNING" for s in lab.status(*folders)) == 2, "two at a time")
    assert "JobArrayTaskLimit" in lab.status(folders[3])[0]["reason"]
    for number in (0, 3):  # a single element is requeued; the last one has the number of the whole array
        lab.step(folders[number], 3)
        lab.wait(60, lambda n=number: _stopped(lab, folders[n], jobs[n]), "the end of its first start")
    for folder in folders:
        lab.wait(120, lambda f=folder: lab.squeue(f) == "COMPLETED", folder.name)
    starts = [lab.starts(folder) for folder in folders]
    # A signal that SLURM delivers late also ends the second start.
    assert [len(some) > 1 for some in starts] == [True, False, False, True], starts
    assert all([end for *_, end in some] == ["SIGUSR2"] * (len(some) - 1) + ["finished"] for some in starts), starts
    lab.equal(folders[0], "one")
    rates = [metrics.read(f / "metrics.jsonl", "train")[-1]["lr"] for f in folders]
    assert rates[2] == pytest.approx(rates[0] / 2)
    assert (
        json.dumps([s["state"] for s in lab.status(*folders)]) == '["COMPLETED", "COMPLETED", "COMPLETED", "COMPLETED"]'
    )


def _stopped(lab, folder, job):
    """Return whether the signal has ended the first start. It is sent again, because SLURM may time out on a busy machine."""
    if lab.starts(folder)[0][2]:
        return True
    lab.cluster.says("scancel", "--signal=USR2", job)
    time.sleep(1)
    return False


def test_a_crash_loop_ends_with_the_reason(lab, loop):
    lab.end(loop, 90, "FAILED")
    # srun may end rank 0 before it has noticed that rank 1 is gone; then no process records the end of that start.
    ends = [end.partition(":")[0] for *_, end in lab.starts(loop)]
    assert len(ends) == 2 and set(ends) <= {"LostRankError", ""}
    seen = lab.status(loop)[0]
    assert "2 starts in a row brought no checkpoint beyond step 0 (idle_restarts=1)" in seen["reason"]
    last = "another rank died" if any(ends) else "no rank could say why: killed, or out of memory"
    assert last in seen["reason"]
    assert "rank 1: " in lab.sparo("launch", "logs", str(loop))  # the killed rank, which printed nothing


def test_the_time_limit_saves_requeues_and_resumes(lab, limited):
    lab.end(limited, 300)
    lab.equal(limited)
    starts = lab.starts(limited)
    assert len(starts) > 1 and starts[-1][2] == "finished"
    for (_, first, reason), (_, last, _) in itertools.pairwise(starts):
        # A start that receives the signal while it still imports torch ends without a record, and has nothing to save.
        assert reason == "SIGUSR2" or (reason == "" and first == last), starts
    assert any(a[2] == "SIGUSR2" and a[1] < b[1] for a, b in itertools.pairwise(starts)), starts


def test_a_job_that_is_submitted_inside_another_has_its_own_resources(lab):
    """SLURM_MEM_PER_CPU, SLURM_NTASKS and ranks of the outer job are not options of the inner job's sbatch."""
    words = [
        sys.executable,
        "-m",
        "launch.cli",
        "launch",
        "train",
        "recipe.yaml",
        "name=nested",
        ALONE,
        "--cluster",
        "lab",
    ]
    inner = shlex.join([*words, "--nodes", "1", "--nodelist", "n2", "--cpus-per-task", "2", "--mem-gb", "1"])
    outer = [
        "-p",
        "high",
        "-w",
        "n1",
        "-n",
        "2",
        "--mem-per-cpu",
        "100",
        "-D",
        str(lab.root),
        "-o",
        str(lab.root / "outer.txt"),
    ]
    lab.cluster.says("sbatch", *outer, "--wrap", inner)
    folder = lab.root / "nested"
    lab.wait(
        90,
        lambda: (folder / "jobs/submitted.jsonl").exists() and Records(folder).last_submission(),
        "the inner submission",
    )
    lab.end(folder)
    lab.equal(folder, "one")
    asked = lab.cluster.says("scontrol", "show", "job", Records(folder).last_submission()["jobs"][-1])
    assert "NumTasks=1" in asked and "CPUs/Task=2" in asked and "MinMemoryNode=1G" in asked, asked
