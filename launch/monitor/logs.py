"""Log files of jobs, and the rank to look at after a failure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..jobs.records import RESTART_LIMIT, Records

# Lines of SLURM about the end of a step, after the line that says why.
_NOISE = re.compile(
    r"^(slurmstepd|srun: (error: .*(Exited with exit code|Terminated|Killed)|Job step|Force|Terminat|launch/))|^Try \"srun --help\""
)


class LogSource(NamedTuple):
    """Job (for arrays, the element) and rank whose log is shown."""

    job: str | None
    rank: int


def failing_rank(folder: Path, record: Mapping[str, Any]) -> LogSource:
    """Return the rank to look at: the one that failed first for its own reason, or died without a message; otherwise 0."""
    records = Records(folder)
    # A start that was refused is not the failure.
    failed = [f for job in record["jobs"] for f in records.failures(job) if f["kind"] != RESTART_LIMIT]
    ends = [s for job in record["jobs"] for s in records.starts(job) if "end" in s]
    if not failed or (ends and ends[-1]["end"] == 0 and not (folder / "plan.json").exists()):
        return LogSource(None, 0)
    # Only of the last start, because earlier failures were survived.
    failed = [f for f in failed if (f["job"], f["restart"]) == (failed[-1]["job"], failed[-1]["restart"])]
    job = failed[-1]["job"]
    own = [f for f in failed if f["kind"] != "LostRankError"]
    if own:
        return LogSource(job, own[0]["rank"])
    cluster = record["cluster"]
    # All ranks with a message lost a peer; the silent one is the one that died.
    silent = set(range(cluster["nodes"] * _ranks_per_node(cluster))) - {f["rank"] for f in failed}
    return LogSource(job, min(silent, default=failed[0]["rank"]))


def _ranks_per_node(cluster: Mapping[str, Any]) -> int:
    return cluster["tasks_per_node"] or max(1, cluster["gpus_per_node"])


def log_files(folder: Path, record: Mapping[str, Any], source: LogSource) -> list[Path]:
    """Return the stdout and stderr files of a rank in a submission, if they exist.

    Args:
        folder: the run folder.
        record: the submission.
        source: job and rank; without a job, all jobs of the submission.
    """
    cluster = record["cluster"]
    task = source.rank // _ranks_per_node(cluster) if cluster["starter"] == "torchrun" else source.rank
    if cluster["kind"] == "allocation":
        task = 0  # one file for all ranks
    paths: list[Path] = []
    for job in [source.job] if source.job else record["jobs"]:
        # Runs of one local job have files of their own, in their folders.
        for place in (folder / "jobs", Path(record["logs"])):
            names = [f"{job}_{task}_log.{end}" for end in ("out", "err")]
            if (
                (folder / "plan.json").exists() and cluster["kind"] == "slurm" and "_" not in job
            ):  # elements of an array
                names += sorted(path.name for path in place.glob(f"{job}_*_{task}_log.*"))
            existing = [place / name for name in names if (place / name).exists()]
            if existing:
                paths += existing
                break
    return list(dict.fromkeys(paths))


def last_error_line(record: Mapping[str, Any]) -> str:
    """Return the last line of a job's stderr that says something about a failure, with its file; empty without one."""
    for job in record["jobs"]:
        for path in sorted(Path(record["logs"]).glob(f"{job}_*_log.err")):
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - 8192))
                text = stream.read().decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            messages = [line for line in lines if not _NOISE.match(line)] or lines
            if messages:
                return f"{messages[-1][:300]} ({path.name})"
    return ""
