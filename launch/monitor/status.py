"""Status of submitted jobs: SLURM's state, the run folder's progress, and why a job failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparo_train.core.errors import SparoError

from ..jobs import slurm
from ..jobs.allocation import is_training
from ..jobs.fanout import FanOut
from ..jobs.job import STOPPED
from ..jobs.local_jobs import local_alive
from ..jobs.records import Records
from ..jobs.slurm import JobState
from .folders import current_submission, run_folders, slurm_jobs
from .logs import last_error_line
from .progress import RunProgress, read_progress

_ENDS = {
    "OUT_OF_MEMORY": "out of memory. Increase --mem-gb, or reduce micro_batch_size or data.workers",
    "TIMEOUT": "the time limit was reached before it saved. Increase --signal-seconds",
    "NODE_FAIL": "a node failed and SLURM did not restart the job",
    "DEADLINE": "the deadline passed",
    "BOOT_FAIL": "its nodes did not start",
}


@dataclass(frozen=True)
class Status:
    """One run. `eta` in seconds, `rate` in samples/s; None if unknown. `start`: expected start of a job that waits; `answered`: by SLURM."""

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
    metric: str = ""
    start: str = ""
    answered: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    @property
    def running(self) -> bool:
        """Return whether a job of it is running."""
        return "RUNNING" in self.state

    @property
    def active(self) -> bool:
        """Return whether a job of it is in the queue or running, or may be, because SLURM did not answer."""
        return not self.answered or any(word.strip(",") in slurm.ACTIVE for word in self.state.split())

    @property
    def failed(self) -> bool:
        """Return whether it ended before it was done; a cancelled run is not among them."""
        words = {word.strip(",") for word in self.state.split() if not word[0].isdigit()}
        return bool(words - slurm.ACTIVE - {"COMPLETED", "CANCELLED", slurm.UNKNOWN})


def statuses(folders: Sequence[Path]) -> list[Status]:
    """Return one status per run, the runs of a sweep in its order; if SLURM does not answer, from the folder's records, with state UNKNOWN.

    Raises:
        ConfigError: a folder without submitted jobs.
    """
    runs = run_folders(folders)
    queued = slurm_jobs([record for folder in runs for record in Records(folder).submissions()])
    slurm_error = ""
    try:
        # One query for all folders, because a query per job would load the scheduler.
        slurm_states = slurm.states(queued)
    except SparoError as error:
        slurm_states, slurm_error = {}, str(error)
    return [_status(folder, slurm_states, slurm_error) for folder in runs]


def current_submissions(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the submission of each run that `statuses` shows; the newest one if SLURM does not answer."""
    try:
        slurm_states = slurm.states(
            slurm_jobs([r for folder in runs for r in Records(folder).submissions()]), accounting=False
        )
    except SparoError:
        slurm_states = {}
    return [current_submission(folder, slurm_states)[0] for folder in runs]


def _status(folder: Path, slurm_states: dict[str, JobState], slurm_error: str) -> Status:
    records = Records(folder)
    record, others = current_submission(folder, slurm_states)
    job_states = _job_states(record, slurm_states, records, answered=not slurm_error)
    starts = [s for job in record["jobs"] for s in records.starts(job) if "end" not in s]
    progress = read_progress(folder, _since(record, job_states, starts))
    state, nodes = _summary(job_states), ",".join(dict.fromkeys(s.nodes for s in job_states.values() if s.nodes))
    if slurm_error and record["cluster"]["kind"] == "slurm":
        reason = slurm_error
    elif any(s.active for s in job_states.values()):
        reason = _activity(records, record, job_states, progress, others)
    else:
        reasons = "; ".join(dict.fromkeys(s.reason for s in job_states.values() if s.reason))
        reason = _failure_reason(records, record, state, reasons, nodes)
    return Status(
        str(folder),
        ",".join(record["jobs"]),
        record["on"],
        state,
        nodes,
        progress.step,
        progress.total,
        progress.rate if state in ("RUNNING", slurm.UNKNOWN) else None,
        progress.eta if state == "RUNNING" else None,
        progress.checkpoint,
        max((s["restart"] for s in starts), default=0),
        reason,
        progress.metric,
        next((s.start for s in job_states.values() if s.state == "PENDING" and s.start), ""),
        not slurm_error or record["cluster"]["kind"] != "slurm",
    )


def _since(record: Mapping[str, Any], job_states: Mapping[str, JobState], starts: Sequence[Mapping[str, Any]]) -> float:
    """Return when this start of the job began. Earlier records belong to earlier starts."""
    since = starts[-1]["time"] if starts else record.get("time", 0.0)
    elapsed = [s.elapsed_seconds for s in job_states.values() if s.state == "RUNNING" and s.elapsed_seconds is not None]
    # After a requeue, SLURM knows of the new start before its first rank leaves a record. Clocks may differ by seconds.
    return max(since, time.time() - max(elapsed) - 5) if elapsed else since


def _activity(
    records: Records,
    record: Mapping[str, Any],
    job_states: Mapping[str, JobState],
    progress: RunProgress,
    others: Sequence[str],
) -> str:
    """Return why a job waits, or its activity if it is not training."""
    notes = list(dict.fromkeys(s.reason for s in job_states.values() if s.reason))
    if any(s.state == "RUNNING" for s in job_states.values()):
        if progress.phase not in ("", "training"):
            notes.append(progress.phase)
        if progress.straggler:
            notes.append(progress.straggler)
    notes += [f"started again without {line}" for line in _bad_nodes(records, record)]
    if others:
        notes.append(
            f"job {', '.join(others)} of this run is in the queue, too. Run `sparo launch cancel {records.folder}`"
        )
    return "; ".join(notes)


def _job_states(
    record: dict[str, Any], slurm_states: dict[str, JobState], records: Records, answered: bool
) -> dict[str, JobState]:
    """Return the state of every job of a submission, with elements of arrays separately. `answered`: by SLURM."""
    kind = record["cluster"]["kind"]
    job_states: dict[str, JobState] = {}
    for job in record["jobs"]:
        if kind == "slurm":
            own = {j: state for j, state in slurm_states.items() if j == job or j.startswith(f"{job}_")}
            if own and {s.state for s in own.values()} == {"COMPLETED"} and _count_missing(records.folder):
                own = {job: JobState("FAILED", f"{_count_missing(records.folder)} element(s) have no result")}
            job_states |= own or {job: JobState(_forgotten_state(record, job, records) if answered else slurm.UNKNOWN)}
        elif kind == "allocation":
            alive = slurm_states.get(job, JobState()).active
            state = _allocation_state(record, job, records) if alive else _ended_state(record, job, records)
            job_states[job] = JobState(state, nodes=_nodes(records, job))
        elif kind == "local" and local_alive(job, record["logs"]):
            job_states[job] = JobState(_lane_state(record, job, records), nodes="here")
        else:
            job_states[job] = JobState(_ended_state(record, job, records), nodes="here")
    return job_states


def _allocation_state(record: Mapping[str, Any], job: str, records: Records) -> str:
    if is_training(records, job):
        return "RUNNING"
    begun = [line for line in records.starts(job) if line["time"] >= record.get("time", 0.0)]
    return _ended_state(record, job, records) if begun or records.bad_nodes(record, job) else "PENDING"


def _nodes(records: Records, job: str) -> str:
    starts = [line for line in records.starts(job) if "nodes" in line]
    return str(starts[-1]["nodes"]) if starts else ""


def _lane_state(record: Mapping[str, Any], job: str, records: Records) -> str:
    """Return the state of a run whose local job is alive: the job runs the runs of its lane one after another."""
    lines = records.starts(job)
    if not lines:
        return "PENDING"
    if "end" not in lines[-1] or (records.folder / "plan.json").exists():
        return "RUNNING"
    return _ended_state(record, job, records)


def _forgotten_state(record: Mapping[str, Any], job: str, records: Records) -> str:
    """Return the state of a job that SLURM does not know any more, from the records of its ranks."""
    if records.is_cancelled(record, job):
        return "CANCELLED"
    ends = [s["end"] for s in records.starts(job) if "end" in s]
    # After a stop, or without a record, the job may have been killed while it waited for its restart.
    return _ended_state(record, job, records) if ends and ends[-1] != STOPPED else slurm.UNKNOWN


def _ended_state(record: Mapping[str, Any], job: str, records: Records) -> str:
    lines = records.starts(job)
    # Without a record of its end, it was killed.
    ends = [s["end"] for s in lines if "end" in s] or [1]
    # A lane of a fan-out has many elements; the last may have succeeded and another not.
    if ends[-1] == 0 and not _count_missing(records.folder):
        return "COMPLETED"
    if not records.is_cancelled(record, job) or _failed_by_itself(lines, records.folder):
        return "FAILED"
    return "CANCELLED"


def _failed_by_itself(lines: Sequence[Mapping[str, Any]], folder: Path) -> bool:
    """Return whether a training reported an error itself; runs of one lane share a job, which may be cancelled later."""
    end = lines[-1] if lines else {}
    # After a rank was cancelled, the others report that they lost it.
    lost_rank = str(end.get("reason", "")).startswith("LostRankError")
    return end.get("end", 0) not in (0, STOPPED) and not lost_rank and not (folder / "plan.json").exists()


def _count_missing(folder: Path) -> int:
    """Return the number of elements of a fan-out that are not done; 0 for a training."""
    return len(FanOut(folder).missing_elements()) if (folder / "plan.json").exists() else 0


def _summary(job_states: dict[str, JobState]) -> str:
    """Summarize states: RUNNING; for several elements `2 RUNNING, 1 PENDING`."""
    counts = Counter(state.state for state in job_states.values())
    if len(job_states) == 1:
        return next(iter(counts))
    return ", ".join(f"{n} {state}" for state, n in counts.most_common())


def _failure_reason(records: Records, record: dict[str, Any], state: str, reason: str, nodes: str) -> str:
    """Return the cause of a job that ended, in one line; empty if it completed."""
    if state == "COMPLETED":
        return ""
    if state == "CANCELLED":
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
        return (
            f"rank {own[-1]['rank']} on {own[-1]['node']}: {(own[-1]['message'].splitlines() or [own[-1]['kind']])[0]}"
        )
    if ends:
        return "" if ends[-1]["reason"] == "finished" else ends[-1]["reason"]
    if "CANCELLED" in state or state == slurm.UNKNOWN:
        return reason
    return (
        _describe_early_end(records, record, nodes) or reason or "ended without a message (killed, or out of memory?)"
    )


def _bad_nodes(records: Records, record: Mapping[str, Any]) -> list[str]:
    """Return one line per problem of nodes that failed the test: `n1, n2: the run folder is not there: /runs/x`."""
    nodes: dict[str, list[str]] = {}
    for job in record["jobs"]:
        for node, text in records.bad_nodes(record, job).items():
            nodes.setdefault(text, []).append(node)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in nodes.items()]


def _describe_early_end(records: Records, record: Mapping[str, Any], nodes: str) -> str:
    """Return why a job ended before a rank could report anything; empty if unknown."""
    if bad := _bad_nodes(records, record):
        return "; ".join(bad)
    if record["cluster"]["kind"] == "slurm" and not any(Path(record["logs"]).glob(f"{record['jobs'][0]}_*_log.*")):
        return (
            f"the first of its nodes ({nodes or 'unknown'}) could not write a log to {record['logs']}. Is this folder on a "
            f"file system that all nodes share? `sparo launch resubmit {records.folder} --exclude NODE` avoids the node"
        )
    line = last_error_line(record)
    return f"{nodes}: {line}" if line and nodes not in ("", "here") else line
