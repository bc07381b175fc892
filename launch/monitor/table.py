"""Table of jobs for a terminal: one line per run, then the reasons, then a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .status import Status


def status_table(statuses: Sequence[Status], wanted: int | None = None) -> Group:
    """Return the table of runs.

    Args:
        statuses: the runs, in order.
        wanted: number of runs before a filter; None: all are shown.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "state", "step", "saved", "samples/s", "left", "last metric", "restarts", "job", "node"):
        table.add_column(column, overflow="fold")
    for status in statuses:
        left = "" if status.eta is None else str(timedelta(seconds=round(status.eta)))
        if status.start:
            left = f"starts {status.start.replace('T', ' ')}"
        row = (
            status.folder, status.state, f"{status.step}/{status.total or '?'}",
            "" if status.checkpoint is None else str(status.checkpoint),
            "" if status.rate is None else f"{status.rate:.0f}", left, status.metric, str(status.restarts or ""),
            f"{status.job} ({status.on})", status.nodes,
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in row))
    reasons = [Text(f"{status.folder}: {status.reason}") for status in statuses if status.reason]
    return Group(table, *reasons, Text(summary_line(statuses, wanted)))


def summary_line(statuses: Sequence[Status], wanted: int | None = None) -> str:
    """Return `6 runs: 3 COMPLETED, 2 RUNNING, 1 PENDING`."""
    counts: Counter[str] = Counter()
    for status in statuses:
        for part in status.state.split(", "):
            number, _, state = part.rpartition(" ")
            counts[state] += int(number or 1)
    of_all = "" if wanted in (None, len(statuses)) else f" of {wanted}"
    noun = "run" if len(statuses) == 1 and not of_all else "runs"
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"{len(statuses)}{of_all} {noun}{': ' if states else ''}{states}"
