"""A table of results before formatting: columns, rows, and cells with intervals."""

from __future__ import annotations

from typing import NamedTuple

from ..tasks.result import format_metric, is_share


class Column(NamedTuple):
    """A column with label and `group`, the heading above it.

    Attributes:
        task: name of the task.
        metric: None is the task's headline.
        members: tasks and metrics whose mean is shown, if it is a mean of several; then `task` is only a name.
    """

    group: str
    label: str
    task: str
    metric: str | None
    members: tuple[tuple[str, str | None], ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks whose scores it shows."""
        return tuple(task for task, _ in self.members) or (self.task,)

    @property
    def heading(self) -> str:
        """Return group and label on one line."""
        return f"{self.group} {self.label}".strip()


MARK, BETTER, WORSE = "†", "▲", "▼"


class Cell(NamedTuple):
    """A score with its 95 % interval if there is one.

    Attributes:
        odd: its data differ from those that the task's name stands for.
        sign: BETTER or WORSE than the row of comparison; empty: not significant, or not compared.
    """

    value: float
    low: float | None = None
    high: float | None = None
    odd: bool = False
    metric: str = ""
    sign: str = ""

    @property
    def number(self) -> str:
        """Return the score in per cent or with its unit, marked if the data are odd."""
        return f"{format_metric(self.metric, self.value, unit=True)}{MARK if self.odd else ''}{self.sign}"

    @property
    def span(self) -> str:
        """Return the interval; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        # A dash would look like another minus sign.
        between = " to " if self.low < 0 else "–"
        return f"{format_metric(self.metric, self.low)}{between}{format_metric(self.metric, self.high)}"


class Row(NamedTuple):
    """A row; `paper`: printed in the SPARO paper, not measured; readout_cells: text columns."""

    name: str
    cells: list[Cell | None]
    paper: bool = False
    readout_cells: tuple[str, ...] = ()


class Grid(NamedTuple):
    """A table before formatting.

    Attributes:
        notes: explanations of marked cells, one per line.
        spans: meaning of the brackets.
        unranked: tasks whose scores are not on the same samples, so none is the best.
        heads: headings of text columns before the scores.
        bold: definition of a best row.
        best: number of the best row of each column if it is significantly better than all others, otherwise None.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str]
    spans: str = "95 % intervals"
    unranked: frozenset[str] = frozenset()
    heads: tuple[str, ...] = ()
    best: tuple[int | None, ...] = ()
    bold: str = "significantly better than all others"

    @property
    def unit(self) -> str:
        """Return the unit of its cells."""
        metrics = {cell.metric for row in self.rows for cell in row.cells if cell is not None}
        return "per cent" if all(map(is_share, metrics)) else "per cent unless another unit is given"
