"""The shell commands around srun, refusals of sbatch, and starts without progress."""

import os
import subprocess
from pathlib import Path

import pytest

from launch.cli.node import _stuck_reason
from launch.jobs import slurm
from launch.jobs.clusters import ClusterConfig
from launch.jobs.job import RestartLimits
from launch.jobs.records import Records
from launch.jobs.script import lines_after, lines_before, requeue_lines
from launch.jobs.submit import _submission_error


def test_values_reach_the_batch_script_as_they_are():
    cluster = ClusterConfig(setup=("module load x",), environment={"A": "it's $HOME; rm"})
    lines = lines_before(cluster, "python", Path("/runs/a b/code"), Path("/runs/a b/jobs"), Path("/runs"))
    script = "\n".join([*lines[4:6], 'printf "%s|%s" "$A" "$PYTHONPATH"'])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "/old"}
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=True).stdout
    assert out == "it's $HOME; rm|/runs/a b/code:/old" and lines[2] == "module load x"


@pytest.mark.parametrize(
    ("setup", "code", "message"),
    [
        ("exit 3", 3, "setup: ended the job with exit code 3\n"),
        ("true", 5, ""),
        ("trap 'echo own >&2' EXIT", 5, "own\n"),
    ],
)
def test_a_setup_that_ends_the_job_says_so(setup, code, message):
    lines = lines_before(ClusterConfig(setup=(setup,)), "python", Path("/code"), Path("/jobs"), Path("/runs"))
    script = "\n".join([*lines[: lines.index("unset SPARO_SETUP") + 1], "exit 5"])
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, message)


def test_names_in_paths_are_not_replaced_in_the_script():
    python = "/scratch/JOBS/PYTHON/bin/python"
    lines = lines_before(ClusterConfig(), python, Path("/r/code"), Path("/r/CWD/it's"), Path("/w/EXCLUDE"))
    script = "\n".join(lines)
    assert script.count("/scratch/JOBS/PYTHON/bin/python -c") == 1 and "/w/EXCLUDE" in script and "/r/CWD/it" in script
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0


def _batch(tmp_path, code, state="RUNNING", restarts="0", marks=("started",), own="0"):
    """Return whether the shell commands after srun request a requeue."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = show ] && echo "JobId=7 JobState={state} Reason=None Requeue=1 Restarts={restarts} BatchFlag=1"\n'
        f'[ "$1" = requeue ] && touch {tmp_path}/requeued\nexit 0\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("scontrol", "sleep"):
        (tmp_path / name).chmod(0o755)
    for mark in marks:
        (tmp_path / f"jobs/.7-{own}.{mark}").touch()
    script = "\n".join([*requeue_lines(tmp_path / "jobs", None), f"(exit {code})\n"]) + "\n".join(lines_after())
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": own}
    ended = subprocess.run(["bash", "-c", script], env=env, check=False).returncode
    requeued = (tmp_path / "requeued").exists()
    assert ended == (0 if requeued else code)  # it waits for SLURM to end it
    assert not list((tmp_path / "jobs").iterdir())
    return requeued


@pytest.mark.parametrize("code", [75, 137, 140])
def test_the_batch_script_requeues_resumable_jobs(tmp_path, code):
    assert _batch(tmp_path, code)


@pytest.mark.parametrize(
    ("code", "facts", "again"),
    [
        (3, {}, False),
        (0, {}, False),
        (3, {"marks": ("started", "lost")}, True),
        (1, {"marks": ()}, True),  # the node could not start it
        (1, {"marks": (), "own": "3", "restarts": "3"}, False),
        (0, {"marks": ()}, False),
        (75, {"marks": ("started", "failed")}, False),  # a rank failed, and srun ended the others
        (137, {"marks": ("started", "failed", "lost")}, True),
        (75, {"state": "COMPLETING"}, False),
        (75, {"restarts": "1"}, False),  # SLURM has started the job elsewhere; this is the rest of the first start
    ],
)
def test_the_batch_script_checks_the_job_before_it_requeues(tmp_path, code, facts, again):
    assert _batch(tmp_path, code, **facts) is again


def test_starts_without_progress_are_counted_per_job(tmp_path):
    records = Records(tmp_path)
    place = {"job": "5", "restart": 0, "node": "n1"}
    for restart, step in enumerate([0, 0, 10, 10, 10]):
        records.add("starts", {**place, "restart": restart, "step": step})
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000010/meta.json").touch()
    now = {**place, "restart": 5}
    assert _stuck_reason(records, now, RestartLimits(3)) is None
    told = _stuck_reason(records, now, RestartLimits(2))
    assert (
        told and "3 starts in a row brought no checkpoint beyond step 10" in told and "killed, or out of memory" in told
    )
    records.add("failures", {**now, "restart": 4, "rank": 3, "code": 2, "kind": "DataError", "message": "x.tar: gone"})
    assert "rank 3 on n1: x.tar: gone" in (_stuck_reason(records, now, RestartLimits(2)) or "")
    assert _stuck_reason(records, {**now, "job": "6"}, RestartLimits(0)) is None


def test_restarts_and_hours_of_one_job_have_limits(tmp_path):
    records, place = Records(tmp_path), {"job": "5", "node": "n1"}
    for restart in range(4):  # each start saves one step, so `idle_restarts` never ends the job
        records.add("starts", {**place, "restart": restart, "step": restart, "time": 3600.0 * restart})
        records.add(
            "starts", {**place, "restart": restart, "end": 75, "reason": "SIGTERM", "time": 3600.0 * restart + 1800}
        )
        (tmp_path / f"checkpoints/step-0000000{restart + 1}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-0000000{restart + 1}/meta.json").touch()
    now = {**place, "restart": 4}
    assert _stuck_reason(records, now, RestartLimits()) is None
    assert "3 restarts (max_restarts=2)" in (_stuck_reason(records, now, RestartLimits(restarts=2)) or "")
    assert "2.0 hours (max_hours=2) and came to step 4" in (_stuck_reason(records, now, RestartLimits(hours=2)) or "")
    assert _stuck_reason(records, now, RestartLimits(hours=2.5)) is None
    assert _stuck_reason(records, now, RestartLimits(restarts=2, first=2)) is None  # earlier launches in an allocation
    # An evaluation has no checkpoints, so all starts count.
    assert "4 starts in a row" in (_stuck_reason(records, now, RestartLimits(), has_checkpoints=False) or "")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "--account"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "your queue"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "--gpus-per-node"),
        ("sbatch: error: Something new", "sbatch refused the job: Something new"),
        ("sbatch: fatal: Could not establish a configuration source", "Set SLURM_CONF"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", "nothing was submitted"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_change(said, message):
    assert message in str(_submission_error(said))


def test_reasons_are_explained():
    assert slurm.explain_reason("(Resources)") == "(Resources): waits for nodes to become free"
    assert slurm.explain_reason("ReqNodeNotAvail, UnavailableNodes:n1").endswith("drained, down or reserved")
    assert slurm.explain_reason("None") == "" and slurm.explain_reason("SomethingElse") == "SomethingElse"
