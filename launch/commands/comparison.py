"""`sparo eval compare`: two checkpoints on the same samples, as a table and a plot."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from evals.report.compare import compare
from evals.report.paper_tables import describe_precisions
from evals.report.plots import relative_change
from evals.report.results_file import Record, find_records
from evals.tasks.result import format_metric
from sparo_train.core.errors import ConfigError, DataError

from ..views.terminal import console, out


def print_comparison(first: str, second: str, plot: Path | None) -> None:
    """Print the paired differences of all common tasks, and plot relative changes.

    Raises:
        ConfigError: no common task, or none that can be compared.
    """
    sides: list[dict[str, Record]] = []
    for source in (first, second):
        sides.append({record.task: record for record in find_records(source)})
    table = Table(
        title=f"{second} compared with {first}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("task", "headline", "n", "difference", "95 %", "only 1st", "only 2nd", "p"):
        left = name in ("task", "headline")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, min_width=7 if name == "p" else None)
    common = [task for task in sides[0] if task in sides[1]]
    if not common:
        raise ConfigError(
            f"no common task: {first} has {', '.join(sides[0])}, {second} has {', '.join(sides[1])}. Score both with the same --data."
        )
    compared = []
    for task in common:
        try:
            c = compare(sides[0][task], sides[1][task])
        except DataError as error:
            console.print(str(error), soft_wrap=True)
            continue
        compared.append(task)
        ends = "–".join(format_metric(c.headline, v, "+") for v in c.interval)
        table.add_row(
            task,
            c.headline,
            str(c.n),
            format_metric(c.headline, c.difference, "+", digits=2),
            ends,
            str(c.only_first),
            str(c.only_second),
            "-" if c.p is None else f"{c.p:.2g}",
        )
    for note in describe_precisions([side[task] for side in sides for task in compared]):
        console.print(note, soft_wrap=True)
    if not compared:
        raise ConfigError(f"{first} and {second}: no task can be compared, for the reasons above")
    out.print_wide(table)
    if plot:  # of the compared checkpoints only
        before, after = ({task: side[task] for task in compared} for side in sides)
        relative_change(before, after, plot)
        out.print(str(plot), soft_wrap=True)
