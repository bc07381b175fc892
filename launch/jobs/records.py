"""Records of a folder's jobs: RUN/jobs/*.jsonl, one line per event, append-only.

submitted.jsonl   every submission: job, cluster, command, code, logs
starts.jsonl      every start of a job's first rank, and how it ended
failures.jsonl    errors of ranks
cancelled.jsonl   jobs that `sparo launch cancel` ended, next to their logs
.JOB.nodes        nodes that failed the test before the ranks' start, and why
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sparo_train.core.disk.checkpoint_store import CheckpointStore
from sparo_train.core.disk.metrics import read
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import read_json
from sparo_train.core.world import whole_number

_REQUIRED_FIELDS: dict[str, dict[str, type]] = {
    "submitted": {"jobs": list, "on": str, "cluster": dict},
    "starts": {"job": str, "restart": int},
    "cancelled": {"job": str},
    "failures": {"job": str, "restart": int, "rank": int, "kind": str, "message": str, "node": str},
}
SWEEP_FILE = "sweep.json"  # in the sweep's folder: the names of its runs, in order
RESTART_LIMIT = "RestartLimit"  # kind of the failure of a start that is refused
_LOCK_SECONDS = 300.0  # a launch that copies the code to a slow disk, or waits for SLURM's controller


class Records:
    """Records of one run or fan-out folder."""

    def __init__(self, folder: Path):
        self.folder, self.jobs = folder, folder / "jobs"

    def submissions(self) -> list[dict[str, Any]]:
        """Return all submissions, oldest first."""
        return self._read("submitted")

    def last_submission(self) -> dict[str, Any] | None:
        """Return the newest submission."""
        submissions = self.submissions()
        return submissions[-1] if submissions else None

    def starts(self, job: str) -> list[dict[str, Any]]:
        """Return starts of a job (of all elements, for an array's number) and their ends, oldest first."""
        return [line for line in self._read("starts") if _belongs_to(line["job"], job)]

    def failures(self, job: str) -> list[dict[str, Any]]:
        """Return the errors of a job's ranks, oldest first."""
        return [line for line in self._read("failures") if _belongs_to(line["job"], job)]

    def is_cancelled(self, record: Mapping[str, Any], job: str) -> bool:
        """Return whether a job was cancelled; it is recorded in the folder of its logs, which the runs of one lane share."""
        cancellations = read(Path(str(record.get("logs", self.jobs))) / "cancelled.jsonl")
        return any(_belongs_to(str(line.get("job")), job) for line in cancellations)

    def bad_nodes(self, record: Mapping[str, Any], job: str) -> dict[str, str]:
        """Return the nodes on which a job's ranks could not start, with the problem of each."""
        path = Path(str(record.get("logs", self.jobs))) / f".{job}.nodes"
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return {}
        return dict(line.split("\t", 1) for line in lines if "\t" in line)

    def add(self, kind: str, facts: Mapping[str, Any], folder: Path | None = None) -> None:
        """Append one line to a file of `folder` (default: the run's jobs); a short line is appended whole, whoever else appends."""
        place = folder or self.jobs
        place.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": time.time(), **facts}) + "\n"
        # Open for each line, so that nothing is written through the handle of a folder that was moved.
        handle = os.open(place / f"{kind}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # In one write, because ranks on several machines append to the same file.
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def step(self) -> int:
        """Return the step of the newest checkpoint; 0 without one."""
        return max(CheckpointStore(self.folder / "checkpoints").steps(), default=0)

    def is_finished(self) -> bool:
        """Return whether the training has done all of its steps and evaluations."""
        return self.heartbeat().get("phase") == "finished"

    def heartbeat(self) -> dict[str, Any]:
        """Return the content of heartbeat.json; empty without a readable one."""
        try:
            beat = json.loads((self.folder / "heartbeat.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return beat if isinstance(beat, dict) else {}

    def _read(self, kind: str) -> list[dict[str, Any]]:
        """Return valid lines; others are truncated, or of another version."""
        lines = read(self.jobs / f"{kind}.jsonl")
        valid_lines = [
            line
            for line in lines
            if all(isinstance(line.get(key), type_) for key, type_ in _REQUIRED_FIELDS[kind].items())
        ]
        return [
            record
            for line in valid_lines
            if (record := self._submission(line) if kind == "submitted" else line) is not None
        ]

    def _submission(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Return a submission with defaults for what older versions did not write; None without a location."""
        cluster = {"starter": "srun", "nodes": 1, "tasks_per_node": None, "gpus_per_node": 0, **line["cluster"]}
        if not isinstance(cluster.get("kind"), str) or not all(isinstance(job, str) for job in line["jobs"]):
            return None
        return {"logs": str(self.jobs), **line, "cluster": cluster}


def sweep_runs(folder: Path) -> list[Path]:
    """Return the runs of a sweep's folder, in the order of the sweep; empty for other folders."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        return []
    names = read_json(path, dict).get("runs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: lacks the list `runs`. Name the run folders instead of the sweep's folder.")
    own = [folder] if (folder / "config.yaml").is_file() else []  # a run that has the name of a sweep
    runs = [*own, *(folder.parent / name for name in names)]
    # Runs of a launch that SLURM refused have no job; those of later launches have.
    return [run for run in runs if Records(run).last_submission() is not None] or runs


def _belongs_to(job: str, job_or_array: str) -> bool:
    return job == job_or_array or job.startswith(f"{job_or_array}_")


@contextmanager
def launch_lock(folders: Sequence[Path]) -> Iterator[None]:
    """Hold these folders for a submission, so that two launches of one run cannot both find it idle.

    Raises:
        ConfigError: another launch holds one of them for minutes.
    """
    from filelock import FileLock, Timeout  # not needed by ranks

    with ExitStack() as held:
        for folder in sorted(
            {folder.resolve() for folder in folders}
        ):  # in one order, so that two launches do not wait for each other
            try:
                held.enter_context(FileLock(folder / ".launch.lock", timeout=_LOCK_SECONDS))
            except Timeout:
                raise ConfigError(
                    f"{folder}: another `sparo launch` or `sparo launch resubmit` has been submitting this run for "
                    f"{_LOCK_SECONDS:g} s. Wait for it, or end it."
                ) from None
        yield


def current_attempt() -> dict[str, Any]:
    """Return which job, which start of it, and which machine this process belongs to."""
    env = os.environ
    # submitit's own numbers first, because a local job inside a SLURM job is a different job.
    job_ids = [env[name] for name in ("SUBMITIT_DEBUG_JOB_ID", "SUBMITIT_LOCAL_JOB_ID") if name in env]
    if "SLURM_ARRAY_JOB_ID" in env:
        job_ids.append(f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}")
    return {
        "job": [*job_ids, env.get("SLURM_JOB_ID", str(os.getpid()))][0],
        "restart": whole_number(env, "SLURM_RESTART_COUNT", 0),
        "step_id": env.get("SLURM_STEP_ID"),
        "node": env.get("SLURMD_NODENAME", platform.node()),
        "nodes": env.get("SLURM_JOB_NODELIST", platform.node()),
    }
