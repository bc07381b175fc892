"""Scores in one table: a row per task and metric, a column per checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from evals.report.paper_tables import MARK
from evals.tasks.result import Result, is_share, shown


def results_table(results: Mapping[str, Mapping[str, Result]], title: str) -> Table:
    """Rows: (task, metric); columns: checkpoints; the headline comes first, its 95 % interval below it; odd data is marked."""
    odd = any(result.note for by_task in results.values() for result in by_task.values())
    table = Table(title=title, title_justify="left", caption=f"{MARK} not the listed data" if odd else None)
    for column in ("task", "metric", "n", "chance", *results):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", overflow="fold")
    tasks = dict.fromkeys(task for by_task in results.values() for task in by_task)
    for task in tasks:
        first = max((r[task] for r in results.values() if task in r), key=lambda r: len(r.metrics))
        found = [by_task.get(task) for by_task in results.values()]
        head = [shown(r.headline, r.value, unit=True) + (MARK if r.note else "") if r else "-" for r in found]
        table.add_row(
            task,
            first.headline,
            str(first.n),
            shown(first.headline, first.chance) if is_share(first.headline) else "-",
            *head,
            style="bold",
        )
        table.add_row(
            "",
            "  95 %",
            "",
            "",
            *(f"{shown(r.headline, r.interval[0])}–{shown(r.headline, r.interval[1])}" if r else "-" for r in found),
        )
        for metric in first.metrics:
            if metric != first.headline:
                table.add_row(
                    "",
                    metric,
                    "",
                    "",
                    *(shown(metric, r.metrics[metric]) if r and metric in r.metrics else "-" for r in found),
                )
        table.add_section()
    return table
