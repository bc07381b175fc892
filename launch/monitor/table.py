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

_WRAPPED = ("run", "last metric", "job", "node")  # columns that may be folded in a narrow terminal


def status_table(statuses: Sequence[Status], total: int | None = None) -> Group:
    """Return the table of runs; columns without any value are left out.

    Args:
        statuses: the runs, in order.
        total: number of runs before a filter; None: all are shown.
    """
    several = len({status.on for status in statuses}) > 1
    rows = [_cells(status, several) for status in statuses]
    columns = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        widest = max(len(row[name]) for row in rows) if name not in _WRAPPED else None
        table.add_column(name, overflow="fold", no_wrap=name not in _WRAPPED, min_width=widest)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in columns))
    reasons = [Text(f"{status.folder}: {status.reason}") for status in statuses if status.reason]
    return Group(*([table] if rows else []), *reasons, Text(summary_line(statuses, total)))


def _cells(status: Status, several_clusters: bool) -> dict[str, str]:
    """Return one row by column."""
    left = "" if status.eta is None else str(timedelta(seconds=round(status.eta)))
    return {
        "run": status.folder,
        "state": status.state,
        "step": f"{status.step}/{status.total or '?'}",
        "saved": "" if status.checkpoint is None else str(status.checkpoint),
        "samples/s": "" if status.rate is None else f"{status.rate:.0f}",
        "left": left,
        "starts": status.start.replace("T", " "),
        "last metric": status.metric,
        "restarts": str(status.restarts or ""),
        "job": status.job + (f" ({status.on})" if several_clusters else ""),
        "node": status.nodes,
    }


def summary_line(statuses: Sequence[Status], total: int | None = None) -> str:
    """Return `6 runs: 3 COMPLETED, 2 RUNNING, 1 PENDING`."""
    counts: Counter[str] = Counter()
    for status in statuses:
        for part in status.state.split(", "):
            number, _, state = part.rpartition(" ")
            counts[state] += int(number or 1)
    of_all = "" if total in (None, len(statuses)) else f" of {total}"
    noun = "run" if len(statuses) == 1 and not of_all else "runs"
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"{len(statuses)}{of_all} {noun}{': ' if states else ''}{states}"
