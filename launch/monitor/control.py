"""Requests to jobs: end, save now, submit again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from sparo_train.core.errors import ConfigError

from ..jobs import slurm
from ..jobs.local_jobs import end_local, local_alive, rank_processes
from ..jobs.records import Records
from ..jobs.slurm import JobState
from .folders import open_jobs, run_folders, slurm_jobs
from .progress import read_progress


def cancel(folders: Sequence[Path]) -> dict[Path, list[str]]:
    """End all jobs of these folders that are not over; return them by run. Training saves first, as after any signal.

    Raises:
        ConfigError: a run has ended, and its local job continues with other runs of a sweep.
    """
    runs = run_folders(folders)
    cancelled = _open_jobs_by_run(runs)
    _refuse_lanes(runs, cancelled)
    queued = [job for folder, jobs in cancelled.items() for job in jobs if _kind(folder, job) == "slurm"]
    if queued:
        slurm.retry_while_away(lambda: slurm.cancel(queued) or "", 60)
    for folder, jobs in cancelled.items():
        for job in jobs:
            record = _record(folder, job)
            Records(folder).add("cancelled", {"job": job}, Path(record["logs"]))
            if record["cluster"]["kind"] == "local" and local_alive(job, record["logs"]):
                end_local(job)
            elif record["cluster"]["kind"] == "allocation":
                slurm.send_signal([_step(folder, job)], "TERM")
    return cancelled


def save_now(folders: Sequence[Path]) -> dict[Path, list[str]]:
    """Let the trainings of these folders write a checkpoint and continue; return the jobs by run, none for one that has no steps yet."""
    running: dict[Path, list[str]] = {}
    for folder, jobs in _open_jobs_by_run(run_folders(folders)).items():
        lines = [line for job in jobs for line in Records(folder).starts(job)]
        # Before its first step, a run has nothing to save, and its processes may not be ready for the signal. After its
        # end, a local job trains another run.
        training = lines and "end" not in lines[-1] and read_progress(folder, lines[-1]["time"]).phase
        running[folder] = jobs if training else []
        for job in running[folder]:
            if _kind(folder, job) == "local":
                for pid in rank_processes(job):
                    os.kill(pid, signal.SIGUSR1)
            else:
                slurm.send_signal([_step(folder, job)], "USR1")
    return running


def _open_jobs_by_run(runs: Sequence[Path]) -> dict[Path, list[str]]:
    submissions = {folder: Records(folder).submissions() for folder in runs}
    states: dict[str, JobState] = {}
    queued = slurm_jobs([record for records in submissions.values() for record in records])
    if queued:

        def ask() -> str:
            states.update(slurm.states(queued, accounting=False))
            return ""

        slurm.retry_while_away(ask, 60)
    return {
        folder: list(dict.fromkeys(job for record in records for job in open_jobs(folder, record, states)))
        for folder, records in submissions.items()
    }


def _record(folder: Path, job: str) -> dict:
    """Return the newest submission of a job."""
    base = job.partition("_")[0]
    return next(r for r in reversed(Records(folder).submissions()) if job in r["jobs"] or base in r["jobs"])


def _kind(folder: Path, job: str) -> str:
    return _record(folder, job)["cluster"]["kind"]


def _step(folder: Path, job: str) -> str:
    """Return the step of a run's ranks, as `12.0`, or the job if no start was recorded.

    Other runs may have steps in the same allocation. And SLURM refuses signals to a job, but not to its steps, as long
    as it has not noticed that the job's nodes are ready (state CONFIGURING, observed for minutes with SLURM 22.05).
    """
    starts = [line for line in Records(folder).starts(job) if line.get("step_id") is not None]
    return f"{job}.{starts[-1]['step_id']}" if starts else job


def _refuse_lanes(runs: Sequence[Path], open_by_run: dict[Path, list[str]]) -> None:
    """Raise `ConfigError` for a run that has ended while its local job trains runs that were not named."""
    for folder, jobs in open_by_run.items():
        for job in jobs:
            lines = Records(folder).starts(job)
            others = any(job in more for run, more in open_by_run.items() if run != folder)
            if _kind(folder, job) == "local" and lines and "end" in lines[-1] and not others:
                raise ConfigError(
                    f"{folder}: has ended; job {job} is now training other runs of the same sweep. Name the run that you want to cancel."
                )
