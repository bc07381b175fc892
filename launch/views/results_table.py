"""Tables of scores and data sets, and progress of encoding, that fit a terminal without splitting words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evals.report.grid import MARK, Cell, Grid
from evals.tasks.result import Result, format_metric, is_share

from .progress import Bar
from .terminal import out


class Encoding:
    """A bar per set that is being encoded."""

    def __init__(self, checkpoint: str, silent: bool):
        self.checkpoint, self.silent, self._bar = checkpoint, silent, Bar()
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        if not self.silent:
            self._bar.start()
        return self._report

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _report(self, place: str, done: int, total: int) -> None:
        if self.silent:
            return
        # Show the bar when the first images are done, because stored ones need none.
        if place not in self._tasks:
            self._tasks[place] = self._bar.start_task_named(f"{Path(self.checkpoint).name}: {place}", total)
        self._bar.show(self._tasks[place], done, total)


def show_catalogue(root: Path) -> None:
    """Show every data set below `root`: whether it is present and complete, and its expected content."""
    from evals.suite import catalogue

    out.print(f"Data sets. Each is expected in {root}/NAME (--root), or there in clip-benchmark's wds layout:\n")
    for entry in catalogue.datasets():
        # One line for all languages of a set.
        if entry.languages and not entry.name.endswith(f"/{entry.languages[0]}"):
            continue
        presence = catalogue.check_presence(entry, root)
        facts = [f"{entry.n:,} images"] if entry.n else []
        facts += [f"{entry.questions:,} questions"] if entry.questions else []
        facts += [f"{entry.classes} classes"] if entry.classes else []
        facts += [f"chance {100 * entry.chance:.1f} %"] if entry.chance else []
        facts += [f"languages {', '.join(entry.languages)}"] if entry.languages else []
        colour = {"absent": "dim", "odd": "red"}.get(presence.state, "green")
        out.print_line((entry.name, "bold"), "  ", (presence.state, colour), f"  {', '.join(facts)}")
        source = f"; from {entry.source}" if entry.source else ""
        out.print_line(f"    {presence.note}; licence: {entry.licence}{source}")


def grid_table(grid: Grid, transpose: bool) -> Table:
    """Return a table for the terminal, intervals below the values, the paper's own numbers dimmed."""
    table = Table(title=f"{grid.title}, {grid.unit}, {grid.spans}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    # Printed numbers are dimmed, so that they are not mistaken for measured ones.
    styles = ["dim" if row.paper else None for row in grid.rows]
    best = grid.best or (None,) * len(grid.columns)
    rows = [
        [*row.readout_cells, *(_cell_text(cell, i == b) for cell, b in zip(row.cells, best, strict=True))]
        for i, row in enumerate(grid.rows)
    ]
    heads = [*grid.heads, *(column.heading for column in grid.columns)]
    if transpose:
        for row, style in zip(grid.rows, styles, strict=True):
            table.add_column(row.name, justify="right", style=style, overflow="fold")
        for head, cells in zip(heads, zip(*rows, strict=True), strict=True):
            table.add_row(head, *cells)
        return table
    for head in grid.heads:
        table.add_column(head, overflow="fold")
    for column in grid.columns:
        table.add_column(f"{column.group}\n{column.label}".strip(), justify="right", overflow="fold")
    for row, cells, style in zip(grid.rows, rows, styles, strict=True):
        table.add_row(row.name, *cells, style=style)
    return table


def _cell_text(cell: Cell | None, best: bool) -> Text:
    if cell is None:
        return Text("-")
    number = Text(cell.number, style="bold" if best else "")
    return number.append(f"\n{cell.span}", style="not bold") if cell.span else number


_NAME = 14  # characters per line of a column title
_FIXED = ("task", "metric", "n", "chance")


def results_table(results: Mapping[str, Mapping[str, Result]], title: str) -> Group:
    """Return a table with rows (task, metric) and columns of checkpoints; the headline first, its 95 % interval below; unusual data are marked.

    Checkpoints that do not fit next to the others have a separate table below.
    """
    names = list(results)
    tables: list[Table] = []
    while names:
        count = max(
            1,
            max(
                (n for n in range(1, len(names) + 1) if _is_narrow_enough({k: results[k] for k in names[:n]})),
                default=1,
            ),
        )
        part, names = {name: results[name] for name in names[:count]}, names[count:]
        tables.append(_table(part))
    return Group(Text(title, style="italic"), *tables)  # a table's own title would be wrapped at the table's width


def _is_narrow_enough(results: Mapping[str, Mapping[str, Result]]) -> bool:
    free = out.options.update(width=1 << 16)  # measured without any wrapping
    return Measurement.get(out, free, _table(results)).maximum <= out.width


def _table(results: Mapping[str, Mapping[str, Result]]) -> Table:
    scored = [result for by_task in results.values() for result in by_task.values()]
    captions = ["data differ from the catalogue"] if any(result.note for result in scored) else []
    captions += dict.fromkeys(text for result in scored if (text := result.left_out()))
    table = Table(
        caption=f"{MARK} {'; '.join(captions)}" if captions else None,
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for column in _FIXED:
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", no_wrap=True)
    for name in results:
        table.add_column(heading(name), justify="right", overflow="fold")
    tasks = dict.fromkeys(task for by_task in results.values() for task in by_task)
    for task in tasks:
        # The checkpoint with most metrics gives the row names; others have dashes for missing ones.
        first = max((r[task] for r in results.values() if task in r), key=lambda r: len(r.metrics))
        task_results = [by_task.get(task) for by_task in results.values()]
        head = [
            format_metric(r.headline, r.value, unit=True) + (MARK if r.odd() else "") if r else "-"
            for r in task_results
        ]
        chance = format_metric(first.headline, first.chance) if is_share(first.headline) else "-"
        table.add_row(task, first.headline, str(first.n), chance, *head, style="bold")
        spans = (
            f"{format_metric(r.headline, r.interval[0])}–{format_metric(r.headline, r.interval[1])}" if r else "-"
            for r in task_results
        )
        table.add_row("", "  95 %", "", "", *spans)
        for metric in first.metrics:
            if metric != first.headline:
                cells = (
                    format_metric(metric, r.metrics[metric]) if r and metric in r.metrics else "-" for r in task_results
                )
                table.add_row("", metric, "", "", *cells)
        table.add_section()
    return table


def heading(name: str) -> str:
    """Split a name after its own separators into lines of about fourteen characters, without splitting words."""
    lines = [""]
    for piece in re.findall(r"[^\s/_+-]+[\s/_+-]*|[\s/_+-]+", name):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > _NAME:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip() for line in lines)


class ScoreCell(NamedTuple):
    """A score with its interval."""

    metric: str
    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Return the score as text."""
        return format_metric(self.metric, self.value)

    @property
    def interval(self) -> str:
        """Return the interval as text."""
        return f"{format_metric(self.metric, self.low)} to {format_metric(self.metric, self.high)}"


class ScoreRow(NamedTuple):
    """A test with a score per model; `chance` is None if it is not known."""

    label: str
    n: int
    chance: float | None
    cells: list[ScoreCell]

    @property
    def chance_text(self) -> str:
        """Return the chance level as text."""
        return "" if self.chance is None else format_metric(self.cells[0].metric, self.chance)


def rows_table(rows: Sequence[ScoreRow], names: Mapping[str, str], title: str) -> Table:
    """Return a table of a few rows with their intervals; `names` are column titles with their captions."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("test")
    for column in ("n", "chance"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, below in names.items():
        table.add_column(f"{name}\n{below}".strip(), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, str(row.n), row.chance_text, *(f"{cell.text}\n{cell.interval}" for cell in row.cells))
    return table
