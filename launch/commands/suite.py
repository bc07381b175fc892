"""`sparo eval --suite`: score checkpoints on a list of sets, with one estimate of the time, and print its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evals.report.grid import Grid
from evals.report.paper_tables import grid
from evals.report.results_file import Record
from evals.report.suite_layouts import SUITE_LAYOUTS, suite_tasks
from evals.tasks.result import Result

from ..views.results_table import grid_table
from ..views.suite_table import suite_table
from ..views.terminal import out


def print_suite(
    suite: str, results_by_checkpoint: Mapping[str, Mapping[str, Result]], seconds: Mapping[str, float]
) -> None:
    """Print a row per set, and the averages of the suite that are complete.

    Args:
        suite: name of the suite.
        results_by_checkpoint: results by checkpoint and task.
        seconds: time that each task took, over all checkpoints.
    """
    out.print_wide(suite_table(results_by_checkpoint, suite_metrics(suite), seconds))
    averages = _averages(suite, results_by_checkpoint)
    if averages is not None:
        out.print_wide(grid_table(averages, False))
    if line := _incomplete_line(suite, list(results_by_checkpoint.values())):
        out.print(line, soft_wrap=True)


def suite_metrics(suite: str) -> dict[str, str | None]:
    """Return the metric of each task in a suite; None: its headline."""
    return {task.name: task.metric for task in suite_tasks(suite)}


def _averages(suite: str, results_by_checkpoint: Mapping[str, Mapping[str, Result]]) -> Grid | None:
    """Return the table of the suite's averages; None if it has none, or none is complete."""
    records = [
        Record(name, task, result, {}, "", Path())
        for name, by_task in results_by_checkpoint.items()
        for task, result in by_task.items()
    ]
    columns = SUITE_LAYOUTS[suite]
    if not any(_is_complete(column.tasks, results_by_checkpoint) for column in columns if column.members):
        return None
    table = grid(records, suite)
    kept = [i for i, column in enumerate(table.columns) if column.members]
    rows = [row._replace(cells=[row.cells[i] for i in kept]) for row in table.rows]
    best = tuple(table.best[i] for i in kept) if table.best else ()
    return table._replace(columns=[table.columns[i] for i in kept], rows=rows, best=best)


def _is_complete(tasks: Sequence[str], results_by_checkpoint: Mapping[str, Mapping[str, Result]]) -> bool:
    return any(all(task in by_task for task in tasks) for by_task in results_by_checkpoint.values())


def _incomplete_line(suite: str, scored: Sequence[Mapping[str, Result]]) -> str:
    """Return which averages no checkpoint has all sets of, and how many are missing; empty if all are shown."""
    counts = {
        column.label: min((sum(task not in names for task in column.tasks) for names in scored), default=0)
        for column in SUITE_LAYOUTS[suite]
        if column.members
    }
    missing = [f"{label} lacks {count} set{'s' if count > 1 else ''}" for label, count in counts.items() if count]
    return f"averages that are not shown: {', '.join(missing)}" if missing else ""
