"""How `sparo eval` shows what it does: bars, tables, the list of data sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from evals.report.paper_tables import Cell, Grid

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
        # A bar when the first images are done: what is stored already needs none.
        if place not in self._tasks:
            self._tasks[place] = self._bar.start_task_named(f"{Path(self.checkpoint).name}: {place}", total)
        self._bar.show(self._tasks[place], done, total)


def show_catalogue(root: Path) -> None:
    """Every data set below `root`: there or not, whole or not, and what it must be."""
    from evals.suite import catalogue

    out.print(f"Data sets, each in the folder of its name below {root} (--root), or in the wds layout:\n")
    for entry in catalogue.datasets():
        presence = catalogue.check_presence(entry, root)
        facts = [f"{entry.n:,} images"]
        facts += [f"{entry.classes} classes"] if entry.classes else []
        facts += [f"chance {100 * entry.chance:.1f} %"] if entry.chance else []
        colour = {"absent": "dim", "odd": "red"}.get(presence.state, "green")
        out.print_line((entry.name, "bold"), "  ", (presence.state, colour), f"  {', '.join(facts)}")
        out.print_line(f"    {presence.note}; licence: {entry.licence}")


def grid_table(grid: Grid, transpose: bool) -> Table:
    """A grid for the terminal, intervals below the values, the paper's own numbers dimmed."""
    table = Table(title=f"{grid.title}, {grid.unit}, {grid.spans}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    # Printed numbers are set apart: nobody should take them for measured ones.
    styles = ["dim" if row.paper else None for row in grid.rows]
    rows = [[*row.readout_cells, *(_cell_text(cell) for cell in row.cells)] for row in grid.rows]
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


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return cell.number + (f"\n{cell.span}" if cell.span else "")
