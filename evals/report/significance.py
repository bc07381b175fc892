"""Differences of a table that are significant: paired on the same samples where possible, corrected for their number (Holm 1979)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

from scipy.special import ndtr

from sparo_train.core.errors import ConfigError, DataError, did_you_mean

from ..tasks.result import LOWER_IS_BETTER, Z
from .compare import compare
from .grid import BETTER, WORSE, Cell, Column, Grid, Row
from .results_file import Record

_LEVEL = 0.05
ByTask = Mapping[str, Record]


class Difference(NamedTuple):
    """Second score minus the first, its standard error, two-sided p, and whether it is paired."""

    value: float
    error: float
    p: float
    paired: bool


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple comparisons (Holm 1979), in the given order."""
    adjusted, largest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def with_significance(table: Grid, records: Mapping[str, ByTask], reference: str | None) -> Grid:
    """Mark the best of each column if it is significantly better than all others, and every difference to a named row.

    Args:
        table: a table whose rows are named like the checkpoints of `records`.
        records: the results by checkpoint and task.
        reference: the row of comparison; default: none.

    Raises:
        ConfigError: no such row.
    """
    rows = [row for row in table.rows if row.name in records and not row.paper]
    names = [row.name for row in rows]
    if reference is not None and reference not in names:
        # Other tables show the last part of a path only.
        ends = [name for name in names if PurePath(name).name == reference]
        if len(ends) != 1:
            raise ConfigError(f"--reference {reference}: {did_you_mean(reference, names)}")
        reference = ends[0]
    best = tuple(_best(table, number, rows, records) for number in range(len(table.columns)))
    table = table._replace(best=best)
    return table if reference is None else _mark_differences(table, rows, records, reference)


def mark_separated_best(table: Grid) -> Grid:
    """Mark the best of each column if its interval is above all others, for rows without single results (several seeds)."""
    best: list[int | None] = []
    for number, column in enumerate(table.columns):
        cells = {
            i: cell for i, row in enumerate(table.rows) if not row.paper and (cell := row.cells[number]) is not None
        }
        first = _largest(cells) if column.task not in table.unranked else None
        apart = first is not None and all(_is_above(cells[first], cell) for i, cell in cells.items() if i != first)
        best.append(first if apart else None)
    return table._replace(best=tuple(best), bold="above all others with its whole range or interval")


def _is_above(one: Cell, other: Cell) -> bool:
    """Return whether an interval is entirely on the better side of another."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low if one.metric in LOWER_IS_BETTER else one.low > other.high


def _largest(cells: Mapping[int, Cell]) -> int | None:
    metrics = {cell.metric for cell in cells.values()}
    if len(cells) < 2 or len(metrics) > 1:  # scores by two metrics are not ranked
        return None
    sign = -1 if metrics <= LOWER_IS_BETTER else 1
    return max(cells, key=lambda i: sign * cells[i].value)


def _best(table: Grid, number: int, rows: Sequence[Row], records: Mapping[str, ByTask]) -> int | None:
    column = table.columns[number]
    if column.task in table.unranked:
        return None
    cells = {i: cell for i, row in enumerate(table.rows) if row in rows and (cell := row.cells[number]) is not None}
    first = _largest(cells)
    if first is None:
        return None
    others = [i for i in cells if i != first]
    differences = [
        _difference(column, records, table.rows[i], table.rows[first], cells[i], cells[first]) for i in others
    ]
    # A draw of equal scores has no best row.
    apart = all(p < _LEVEL for p in holm([difference.p for difference in differences]))
    return first if apart else None


def _mark_differences(table: Grid, rows: Sequence[Row], records: Mapping[str, ByTask], reference: str) -> Grid:
    """Mark every cell that differs significantly from that of the row `reference`."""
    (base,) = (row for row in rows if row.name == reference)
    differences: dict[tuple[str, int], Difference] = {}
    for row in rows:
        for number, column in enumerate(table.columns):
            cell, other = row.cells[number], base.cells[number]
            if (
                row is base
                or cell is None
                or other is None
                or column.task in table.unranked
                or cell.metric != other.metric
            ):
                continue
            differences[row.name, number] = _difference(column, records, base, row, other, cell)
    ps = dict(zip(differences, holm([difference.p for difference in differences.values()]), strict=True))
    out = []
    for row in table.rows:
        cells = list(row.cells)
        for number, cell in enumerate(cells):
            if cell is not None and ps.get((row.name, number), 1.0) < _LEVEL:
                gain = differences[row.name, number].value * (-1 if cell.metric in LOWER_IS_BETTER else 1)
                cells[number] = cell._replace(sign=BETTER if gain > 0 else WORSE)
        out.append(row._replace(cells=cells))
    unpaired = sum(not difference.paired for difference in differences.values())
    count = f"{len(differences)} comparison{'' if len(differences) == 1 else 's'}"
    note = f"{BETTER}{WORSE} better or worse than {reference}: p < {_LEVEL} after Holm's correction for {count}"
    note += f", {unpaired} of them not paired" if unpaired else ", all paired on the same samples"
    return table._replace(rows=out, notes=[*table.notes, note])


def _difference(column: Column, records: Mapping[str, ByTask], first: Row, second: Row, a: Cell, b: Cell) -> Difference:
    members = column.members or ((column.task, column.metric),)
    found = [_task_difference(task, metric, records[first.name], records[second.name]) for task, metric in members]
    known = [difference for difference in found if difference is not None]
    if len(known) < len(members):
        return _unpaired_difference(a, b)
    if len(known) == 1:
        return known[0]
    error = sum(difference.error**2 for difference in known) ** 0.5 / len(known)
    value = sum(difference.value for difference in known) / len(known)
    return Difference(value, error, _p(value, error), True)


def _task_difference(task: str, metric: str | None, first: ByTask, second: ByTask) -> Difference | None:
    """Return the paired difference of a task; None if its samples cannot be paired."""
    if task not in first or task not in second:
        return None
    one, other = first[task], second[task]
    return _can_pair(_Key(one), _Key(other), metric or one.result.headline)


class _Key:
    """A record as a key of the cache, by its place."""

    def __init__(self, record: Record):
        self.record = record
        self._id = (str(record.folder), record.predictions, record.checkpoint, record.task)

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._id == other._id


@lru_cache(4096)
def _can_pair(one: _Key, other: _Key, metric: str) -> Difference | None:
    try:
        found = compare(one.record, other.record, metric)
    except DataError:
        return None
    low, high = found.interval
    error = (high - low) / (2 * Z)
    # McNemar's exact p is for the share of right answers; a mean over kinds has its own error.
    p = _p(found.difference, error) if found.p is None or found.stratified else found.p
    if error == 0 and found.p is None and found.difference != 0:
        p = min(1.0, 2 * 0.5**found.n)  # every sample changed by the same amount: the sign test
    return Difference(found.difference, error, p, True)


def _unpaired_difference(a: Cell, b: Cell) -> Difference:
    """Return the difference of two scores by their intervals."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Difference(b.value - a.value, 0.0, 1.0, False)
    error = (((a.high - a.low) ** 2 + (b.high - b.low) ** 2) ** 0.5) / (2 * Z)
    return Difference(b.value - a.value, error, _p(b.value - a.value, error), False)


def _p(value: float, error: float) -> float:
    """Return the two-sided p of a difference with a normal error; 1 without an error, because nothing is known of it."""
    return 1.0 if error <= 0 else float(2 * ndtr(-abs(value) / error))
