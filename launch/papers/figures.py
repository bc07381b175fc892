"""Figures of sweeps, drawn as in the papers, with 95 % intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from evals.report.plots import literal, save_figure
from evals.report.seed_average import Spread, spread, spread_caption
from sparo_train.core.errors import ConfigError, did_you_mean

from ..jobs.sweep import SweepFigure
from .sweep_record import RecordRow, SweepRecord, score_axis


@literal()
def draw(record: SweepRecord, path: Path, score: str | None = None, mean: bool = True) -> None:
    """Draw the figure of a record into a file.

    Args:
        record: scores of a sweep.
        path: PNG, PDF or SVG.
        score: TASK, or TASK/METRIC, instead of the one that the sweep names.
        mean: mean and 95 % interval over seeds; False: median and range.

    Raises:
        ConfigError: a score that no run has.
    """
    score = _full_score_name(record, score or (record.figure.score if record.figure else ""))
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    try:
        if record.figure is None:
            _over_parameters(axis, record, score, mean)
            axis.set_xlabel("trained parameters, millions")
        else:
            (_bars if record.figure.kind == "bars" else _lines)(axis, record, record.figure, score, mean)
            axis.set_xlabel(record.figure.x_label)
        label = ", ".join(filter(None, (score, score_axis(score)[1])))
        if record.figure is not None and record.figure.y_label and score == record.figure.score:
            label = record.figure.y_label
        axis.set_ylabel(f"{label}\n{spread_caption(mean)}", fontsize=8)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
        save_figure(figure, path, 130)
    finally:
        plt.close(figure)


def _full_score_name(record: SweepRecord, score: str) -> str:
    """Return the full name of a score: TASK stands for the task's first metric."""
    known = dict.fromkeys(name for row in record.rows for run in row.runs for name in run.scores)
    if not known:
        raise ConfigError(f"{record.sweep}: has no scored runs. Train its runs with `sparo launch train`.")
    if not score:
        return next(iter(known))
    found = next((name for name in known if name == score or name.startswith(f"{score}/")), None)
    if found is None:
        raise ConfigError(f"--task {score}: no run has this score; {did_you_mean(score, known)}")
    return found


def _points(
    rows: Sequence[RecordRow], score: str, mean: bool, divisors: dict[Any, float]
) -> list[tuple[RecordRow, Spread]]:
    """Return rows that have the score with its spread, multiplied for display, or divided by another series' mean."""
    times = score_axis(score)[0]
    found = []
    for row in rows:
        values = list(row.values(score).values())
        if values and (not divisors or row.x in divisors):
            factor = 1 / divisors[row.x] if divisors else times
            found.append((row, spread([factor * value for value in values], mean)))
    return found


def _divisors(record: SweepRecord, series: str, score: str) -> dict[Any, float]:
    if not series:
        return {}
    values = {row.x: list(row.values(score).values()) for row in record.rows if row.series == series}
    return {x: sum(found) / len(found) for x, found in values.items() if found and sum(found)}


def _arms(points: Sequence[Spread]) -> list[list[float]]:
    # A single seed has no interval.
    low = [p.value - (p.value if p.low is None else p.low) for p in points]
    high = [(p.value if p.high is None else p.high) - p.value for p in points]
    return [low, high]


def _lines(axis: Axes, record: SweepRecord, style: SweepFigure, score: str, mean: bool) -> None:
    divisors = _divisors(record, style.relative_to, score)
    for series in dict.fromkeys(row.series for row in record.rows):
        rows = sorted(
            (r for r in record.rows if r.series == series and isinstance(r.x, int | float)),
            key=lambda r: float(r.x or 0),
        )
        points = _points(rows, score, mean, divisors)
        if points:
            spreads = [point for _, point in points]
            axis.errorbar(
                [float(row.x or 0) for row, _ in points],
                [point.value for point in spreads],
                _arms(spreads), marker="o", markersize=4, capsize=2, linewidth=1, label=series,
            )  # fmt: skip
    if style.log_x:
        axis.set_xscale("log", base=2)
        # Matplotlib's labels of powers are math text, which `literal` disables.
        ticks = sorted({float(row.x) for row in record.rows if isinstance(row.x, int | float) and row.runs})
        axis.set_xticks(ticks, [f"{tick:,.10g}" for tick in ticks])
        axis.minorticks_off()
    if divisors:
        axis.axhline(1, color="grey", linewidth=0.8)


def _bars(axis: Axes, record: SweepRecord, style: SweepFigure, score: str, mean: bool) -> None:
    # Only rows with runs, so that a part of a sweep has no gaps.
    found = _points(record.rows, score, mean, _divisors(record, style.relative_to, score))
    names = list(dict.fromkeys(str(row.x) for row, _ in found))
    series = list(dict.fromkeys(row.series for row, _ in found))
    width = 0.8 / len(series)
    for number, name in enumerate(series):
        points = [(row, point) for row, point in found if row.series == name]
        spreads = [point for _, point in points]
        places = [names.index(str(row.x)) + (number - (len(series) - 1) / 2) * width for row, _ in points]
        axis.bar(places, [point.value for point in spreads], width, yerr=_arms(spreads), capsize=2, label=name)
    axis.set_xticks(range(len(names)), ["" if name == "None" else name for name in names])


def _over_parameters(axis: Axes, record: SweepRecord, score: str, mean: bool) -> None:
    """Draw a score over the number of parameters, as in Fig. 3 of the SPARO paper; rows named L_64 and L_128 are points of one line."""
    lines: dict[str, list[RecordRow]] = {}
    for row in record.rows:
        stem, _, number = row.name.rpartition("_")
        lines.setdefault(stem if number.isdecimal() else row.name, []).append(row)
    for name, rows in lines.items():
        points = _points(sorted(rows, key=lambda row: row.parameters), score, mean, {})
        if not points:
            continue
        line = points[0][0].name != name
        x, spreads = [row.parameters / 1e6 for row, _ in points], [point for _, point in points]
        axis.errorbar(
            x, [point.value for point in spreads], _arms(spreads),
            marker="o", markersize=4, capsize=2, linewidth=1, label=name if line else "_nolegend_",
        )  # fmt: skip
        for (row, point), place in zip(points, x, strict=True):
            text = row.name.rpartition("_")[2] if line else row.name
            axis.annotate(text, (place, point.value), textcoords="offset points", xytext=(4, 3), fontsize=7)
    axis.margins(x=0.12)
