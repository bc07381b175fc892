"""`sparo launch check`: a short job that tests every node of a cluster, and a report by node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError

from ..jobs.allocation import run_in_allocation
from ..jobs.clusters import ClusterConfig
from ..jobs.job import Element
from ..jobs.launching import LaunchOptions, submit_and_record
from ..jobs.records import Records
from ..jobs.snapshot import take_snapshot
from .status import Status, statuses

_LIMITS = {"time": 5, "signal_seconds": 30, "idle_restarts": 0, "max_restarts": 0}
_POLL = 1.0  # seconds


@dataclass(frozen=True)
class NodeReport:
    """Tests of one node: facts of its first rank, and problems of all of its ranks; none if it is fine."""

    node: str
    ranks: int
    facts: dict[str, Any]
    problems: tuple[str, ...]


def submit_check(name: str, cluster: ClusterConfig, folder: Path) -> None:
    """Submit the job of a check; its files are written to `folder`. In an allocation, this returns when it has run."""
    short = cluster.model_copy(update={**_LIMITS, "sbatch": {**cluster.sbatch, "no-requeue": True}})
    if cluster.kind != "slurm":
        short = cluster.model_copy(update=_LIMITS)
    folder.mkdir(parents=True, exist_ok=True)
    code = take_snapshot(folder / "code")
    element = Element(("launch", "check-rank", str(folder)), str(folder))
    submit_and_record(LaunchOptions(name, short), [element], folder, f"check-{name}", code)
    if cluster.kind == "allocation":
        run_in_allocation(short, [element], code.path)


def wait_for_check(folder: Path, seconds: float, show: Callable[[Status], None]) -> Status:
    """Wait until the job of a check is over; return its last status. `show` gets every status.

    Raises:
        ConfigError: it is not over after `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        (status,) = statuses([folder])
        show(status)
        if not status.active:
            return status
        if time.monotonic() > end:
            raise ConfigError(
                f"{folder}: the check is still {status.state} after {seconds:g} s{': ' + status.reason if status.reason else ''}. "
                f"`sparo launch status {folder}` shows its state, `sparo launch cancel {folder}` ends it. To wait longer, raise --wait."
            )
        time.sleep(_POLL)


def read_reports(folder: Path, cluster: ClusterConfig) -> list[NodeReport]:
    """Return the reports of all nodes, in the order of their first ranks; nodes that ran no rank are at the end."""
    facts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "ranks").glob("*.json"))]
    by_node: dict[str, list[dict[str, Any]]] = {}
    for rank in facts:
        by_node.setdefault(rank["node"], []).append(rank)
    reports = [
        NodeReport(node, len(ranks), ranks[0], tuple(dict.fromkeys(p for rank in ranks if (p := _problem(rank)))))
        for node, ranks in by_node.items()
    ]
    records = Records(folder)
    record = records.last_submission()
    bad = {n: t for job in (record or {"jobs": []})["jobs"] for n, t in records.bad_nodes(record or {}, job).items()}
    reports += [NodeReport(node, 0, {}, (text,)) for node, text in bad.items()]
    expected = cluster.ranks
    if facts and len(facts) < expected:
        there = {rank["rank"] for rank in facts}
        absent = [str(rank) for rank in range(expected) if rank not in there]
        reports.append(NodeReport("?", 0, {}, (f"rank {', '.join(absent)} did not start Python",)))
    return reports


def _problem(rank: dict[str, Any]) -> str:
    if rank["problem"]:
        return rank["problem"]
    return "" if rank["stage"] == "done" else f"{rank['stage']}: ended or was stopped during this test"


def report_lines(reports: Sequence[NodeReport]) -> list[str]:
    """Return one line per node, then its problems."""
    lines = []
    for report in reports:
        facts = report.facts
        words = [f"{report.node}: {'ok' if not report.problems else 'FAILED'}"]
        if facts:
            words += [f"{report.ranks} rank(s)", f"Python {facts['python']} ({facts['interpreter']})"]
        if versions := facts.get("versions"):
            words.append(f"torch {versions['torch']}")
        if devices := facts.get("devices"):
            words.append(f"{len(devices)} x {devices[0]}" if devices != ["CPU"] else f"CPU, {facts['cores']} core(s)")
        if facts.get("backend"):
            words.append(f"{facts['backend']}, joined in {facts['join_seconds']:.1f} s")
        if speed := facts.get("exchange_gb_per_s"):
            words.append(f"{speed:.2f} GB/s")
        lines += [", ".join(words), *(f"  {problem}" for problem in report.problems)]
    return lines
