"""Status of submitted jobs: SLURM's state, the run folder's progress, and which rank failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparo_train.core.disk.metrics import read, straggler
from sparo_train.core.errors import ConfigError, SparoError

from . import slurm
from .fanout import FanOut
from .local_jobs import end_local, local_alive
from .records import Records
from .slurm import JobState

_ENDS = {
    "OUT_OF_MEMORY": "out of memory. Increase --mem-gb, or reduce micro_batch_size or data.workers",
    "TIMEOUT": "the time limit was reached before it saved. Increase --signal-seconds",
    "NODE_FAIL": "a node failed and SLURM did not restart the job",
    "DEADLINE": "the deadline passed",
    "BOOT_FAIL": "its nodes did not start",
}


@dataclass(frozen=True)
class Status:
    """One run. `eta` in seconds, `rate` in samples/s; None if unknown."""

    folder: str
    job: str
    on: str
    state: str
    nodes: str
    step: int
    total: int | None
    rate: float | None
    eta: float | None
    checkpoint: int | None
    restarts: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def launched_folders(root: Path) -> list[Path]:
    """Return the folders in `root`, and one level below, with submitted jobs, newest last."""
    paths = [path for depth in ("*", "*/*") for path in root.glob(f"{depth}/jobs/submitted.jsonl")]
    modified_times = {path.parent.parent: path.stat().st_mtime for path in paths}
    return sorted(modified_times, key=lambda folder: modified_times[folder])


def statuses(folders: Sequence[Path]) -> list[Status]:
    """Return one status per folder; if SLURM does not answer, from the folder's records, with state UNKNOWN.

    Raises:
        ConfigError: a folder without submitted jobs.
    """
    last = {folder: _last(folder) for folder in folders}
    queued = [job for record in last.values() if record["cluster"]["kind"] == "slurm" for job in record["jobs"]]
    slurm_error = ""
    try:
        # One query for all folders, because a query per job would load the scheduler.
        slurm_states = slurm.states(queued)
    except SparoError as error:
        slurm_states, slurm_error = {}, str(error)
    return [_status(folder, record, slurm_states, slurm_error) for folder, record in last.items()]


def _last(folder: Path) -> dict[str, Any]:
    record = Records(folder).last()
    if record is None:
        folders = ", ".join(str(path) for path in launched_folders(folder if folder.is_dir() else Path("runs"))[-8:])
        raise ConfigError(f"{folder}: no job was submitted there{'; there are ' + folders if folders else ''}")
    return record


def _status(folder: Path, record: dict[str, Any], slurm_states: dict[str, JobState], slurm_error: str) -> Status:
    records = Records(folder)
    job_states = _job_states(record, slurm_states, records)
    starts = [s for job in record["jobs"] for s in records.starts(job) if "end" not in s]
    progress = _progress(folder, since=starts[-1]["time"] if starts else record.get("time", 0.0))
    state, reason = _summary(job_states), "; ".join(dict.fromkeys(s.reason for s in job_states.values() if s.reason))
    if slurm_error and record["cluster"]["kind"] == "slurm":
        reason = slurm_error
    elif not any(s.active for s in job_states.values()):
        reason = _failure_reason(records, record, state, reason)
    if progress.get("phase") and state == "RUNNING" and progress["phase"] != "training":
        reason = reason or str(progress["phase"])
    if state == "RUNNING":
        reason = reason or progress.get("straggler", "")
    return Status(
        str(folder),
        ",".join(record["jobs"]),
        record["on"],
        state,
        ",".join(dict.fromkeys(s.nodes for s in job_states.values() if s.nodes)),
        progress.get("step", 0),
        progress.get("total"),
        progress.get("rate") if state in ("RUNNING", slurm.UNKNOWN) else None,
        progress.get("eta") if state == "RUNNING" else None,
        progress.get("checkpoint"),
        max((s["restart"] for s in starts), default=0),
        reason,
    )


def _job_states(record: dict[str, Any], slurm_states: dict[str, JobState], records: Records) -> dict[str, JobState]:
    """Return the state of every job of a submission, with elements of arrays separately."""
    kind = record["cluster"]["kind"]
    job_states: dict[str, JobState] = {}
    for job in record["jobs"]:
        if kind == "slurm":
            own = {j: state for j, state in slurm_states.items() if j == job or j.startswith(f"{job}_")}
            job_states |= own or {job: JobState()}
        elif kind == "local" and local_alive(job):
            job_states[job] = JobState("RUNNING", nodes="here")
        else:
            # Without a record of its end, it was killed.
            ends = [s["end"] for s in records.starts(job) if "end" in s] or [1]
            # A lane of a fan-out has many elements; the last may have succeeded and another not.
            missing_elements = (records.folder / "plan.json").exists() and FanOut(records.folder).missing()
            done = ends[-1] == 0 and not missing_elements
            end_state = "CANCELLED" if records.cancelled(record, job) else "FAILED"
            job_states[job] = JobState("COMPLETED" if done else end_state, nodes="here")
    return job_states


def _summary(job_states: dict[str, JobState]) -> str:
    """Summarize states: RUNNING; for several elements `2 RUNNING, 1 PENDING`."""
    counts = Counter(state.state for state in job_states.values())
    if len(job_states) == 1:
        return next(iter(counts))
    return ", ".join(f"{n} {state}" for state, n in counts.most_common())


def _progress(folder: Path, since: float) -> dict[str, Any]:
    """Return progress from the heartbeat and the metrics of a run, or the parts of a fan-out.

    Args:
        folder: the folder.
        since: start of the job; records of earlier jobs do not show its phase and speed.
    """
    if (folder / "plan.json").exists():
        fan = FanOut(folder)
        return {"step": len(fan.elements) - len(fan.missing()), "total": len(fan.elements)}
    progress: dict[str, Any] = {}
    fresh = False
    try:
        beat = json.loads((folder / "heartbeat.json").read_text(encoding="utf-8"))
        progress |= {"step": int(beat["step"]), "total": beat.get("total")}
        fresh = float(beat.get("time", since)) >= since
        progress |= {"phase": beat["phase"]} if fresh else {}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    records = read(folder / "metrics.jsonl", "train")
    newest = records[-1] if records else {}
    # From files, because a status must not wait for a node that may hang.
    rate, samples = newest.get("samples_per_second"), newest.get("samples")
    if fresh and newest.get("step") and isinstance(rate, int | float) and isinstance(samples, int | float):
        progress["step"], progress["rate"] = max(newest["step"], progress.get("step", 0)), rate
        progress["straggler"] = straggler(newest)
        if isinstance(progress.get("total"), int) and rate > 0:
            # By samples, because the batch size may grow.
            progress["eta"] = (progress["total"] - progress["step"]) * (samples / newest["step"]) / rate
    return progress | {"checkpoint": Records(folder).step() or None}


def _failure_reason(records: Records, record: dict[str, Any], state: str, reason: str) -> str:
    """Return the cause of a failed job in one line."""
    if state == "COMPLETED":
        return ""
    if state == "CANCELLED" and record["cluster"]["kind"] != "slurm":
        return f"cancelled. `sparo launch resubmit {records.folder}` continues it"
    for word, meaning in _ENDS.items():
        if word in state:
            return meaning
    ends = [s for job in record["jobs"] for s in records.starts(job) if "end" in s]
    # First, because it explains why there was no restart.
    if ends and "stuck" in ends[-1]:
        return ends[-1]["stuck"]
    failed = [f for job in record["jobs"] for f in records.failures(job)]
    own = [f for f in failed if f["kind"] != "LostRankError"] or failed
    if own:
        return f"rank {own[-1]['rank']} on {own[-1]['node']}: {own[-1]['message'].splitlines()[0]}"
    if ends:
        return "" if ends[-1]["reason"] == "finished" else ends[-1]["reason"]
    if "CANCELLED" in state or state == slurm.UNKNOWN:
        return reason
    return reason or "ended without a message (killed, or out of memory?); see `sparo launch logs`"


def failing_rank(folder: Path) -> int:
    """Return the rank to look at: the one that failed first for its own reason, or died without a message; otherwise 0."""
    record, records = _last(folder), Records(folder)
    failed = [f for job in record["jobs"] for f in records.failures(job)]
    ends = [s for job in record["jobs"] for s in records.starts(job) if "end" in s]
    if not failed or (ends and ends[-1]["end"] == 0):
        return 0
    # Only of the last start, because earlier failures were survived.
    failed = [f for f in failed if (f["job"], f["restart"]) == (failed[-1]["job"], failed[-1]["restart"])]
    own = [f for f in failed if f["kind"] != "LostRankError"]
    if own:
        return own[0]["rank"]
    cluster = record["cluster"]
    # All ranks with a message lost a peer; the silent one is the one that died.
    silent = set(range(cluster["nodes"] * _ranks_per_node(cluster))) - {f["rank"] for f in failed}
    return min(silent, default=failed[0]["rank"])


def _ranks_per_node(cluster: Mapping[str, Any]) -> int:
    return cluster["tasks_per_node"] or max(1, cluster["gpus_per_node"])


def log_files(folder: Path, rank: int) -> list[Path]:
    """Return the stdout and stderr files of a rank in the newest submission, if they exist."""
    record = _last(folder)
    cluster = record["cluster"]
    task = rank // _ranks_per_node(cluster) if cluster["starter"] == "torchrun" else rank
    names = [f"{job}_{task}_log.{end}" for job in record["jobs"] for end in ("out", "err")]
    if (folder / "plan.json").exists():  # elements of an array
        names = [p.name for job in record["jobs"] for p in sorted(Path(record["logs"]).glob(f"{job}_*{task}_log.*"))]
    return [path for name in names if (path := Path(record["logs"]) / name).exists()]


def cancel(folder: Path) -> list[str]:
    """End the jobs of a folder's newest submission; return those that were asked to end. Training saves first, as after any signal.

    Raises:
        ConfigError: this run has ended, and its job continues with other runs of a sweep.
    """
    record, records, cancelled_jobs = _last(folder), Records(folder), []
    for job in record["jobs"]:
        if record["cluster"]["kind"] == "slurm":
            slurm.retry_while_away(lambda job=job: slurm.cancel(job) or "", 60)
        elif record["cluster"]["kind"] == "local" and local_alive(job):
            starts = records.starts(job)
            if starts and "end" in starts[-1]:
                raise ConfigError(
                    f"{folder}: has ended; job {job} is now training other runs of its sweep. Name the run to cancel."
                )
            records.add("cancelled", {"job": job}, Path(record["logs"]))
            end_local(job)
        else:
            continue
        cancelled_jobs.append(job)
    return cancelled_jobs
