"""Folders of jobs: runs, fan-outs and sweeps; and the submission of a folder that a command refers to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError

from ..jobs.allocation import is_training
from ..jobs.local_jobs import local_alive
from ..jobs.records import Records, sweep_runs
from ..jobs.slurm import JobState


def launched_folders(root: Path) -> list[Path]:
    """Return the folders in `root`, and one level below, with submitted jobs, newest last."""
    paths = [path for depth in ("*", "*/*") for path in root.glob(f"{depth}/jobs/submitted.jsonl")]
    modified_times = {path.parent.parent: path.stat().st_mtime for path in paths}
    return sorted(modified_times, key=lambda folder: (modified_times[folder], folder))


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return these folders, with the runs of a sweep in place of its folder, in the order of the sweep.

    Raises:
        ConfigError: a folder without submitted jobs.
    """
    runs: list[Path] = []
    for folder in folders:
        runs += sweep_runs(folder) or [folder]
    for folder in runs:
        if Records(folder).last_submission() is None:
            others = ", ".join(str(path) for path in launched_folders(folder if folder.is_dir() else Path("runs"))[-8:])
            raise ConfigError(
                f"{folder}: no job was submitted there{'; folders with jobs: ' + others if others else ''}"
            )
    return list(dict.fromkeys(runs))


def open_jobs(folder: Path, submission: Mapping[str, Any], slurm_states: Mapping[str, JobState]) -> list[str]:
    """Return the jobs of a submission that are not over, with elements of arrays separately."""
    jobs: list[str] = []
    for job in submission["jobs"]:
        kind = submission["cluster"]["kind"]
        if kind == "allocation":
            # The allocation remains after the run.
            if slurm_states.get(job, JobState()).active and is_training(Records(folder), job):
                jobs.append(job)
        elif kind == "slurm":
            own = {j: s for j, s in slurm_states.items() if j == job or j.startswith(f"{job}_")}
            jobs += [j for j, state in own.items() if state.active]
        elif kind == "local" and local_alive(job, submission["logs"]):
            jobs.append(job)
    return jobs


def slurm_jobs(submissions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the numbers of SLURM jobs in these submissions."""
    kinds = ("slurm", "allocation")
    return [job for record in submissions if record["cluster"]["kind"] in kinds for job in record["jobs"]]


def current_submission(folder: Path, slurm_states: Mapping[str, JobState]) -> tuple[dict[str, Any], list[str]]:
    """Return the submission that is shown for a folder, and the jobs of other submissions that are not over.

    It is the one that owns the folder, if it is not over; otherwise the newest that is not over; otherwise the newest.
    """
    submissions = Records(folder).submissions()
    alive = [record for record in submissions if open_jobs(folder, record, slurm_states)]
    if not alive:
        return submissions[-1], []
    owner = _owner_job(folder)
    shown = next((record for record in alive if owner in record["jobs"]), alive[-1])
    return shown, [job for record in alive if record is not shown for job in open_jobs(folder, record, slurm_states)]


def _owner_job(folder: Path) -> str | None:
    try:
        return json.loads((folder / "owner.json").read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError, AttributeError):
        return None
