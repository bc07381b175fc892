"""Progress and table of a suite: one bar over all its sets, and a row per set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.progress import TaskID
from rich.table import Table

from evals.report.grid import MARK
from evals.tasks.result import Result, format_metric
from sparo_train.core.files import escape_control_chars

from .progress import Bar
from .results_table import heading


class SuiteProgress:
    """One bar over all sets of a suite, with the time left, and a line for each scored set.

    Args:
        title: name of the bar.
        sizes: number of images that this process would encode, by task.
        metrics: metric of each task in the suite; None: its headline.
        silent: True for ranks other than the first.
    """

    def __init__(self, title: str, sizes: Mapping[str, int], metrics: Mapping[str, str | None], silent: bool):
        self.title, self.silent, self._bar, self._metrics = title, silent, Bar(), metrics
        self._waiting, self._encoded, self._current = dict(sizes), 0, (0, 0)
        self._sets = len(sizes)
        self._task: TaskID | None = None

    def __enter__(self) -> SuiteProgress:
        if not self.silent:
            self._bar.start()
            self._task = self._bar.start_task_named(self.title, sum(self._waiting.values()))
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def encoding(self, place: str, done: int, total: int) -> None:
        """Show the progress of the set that is being encoded."""
        if done < self._current[0]:  # another set of the same task
            self._encoded += self._current[1]
        self._current = done, total
        self._show(Path(place).name)

    def add_score(self, name: str, result: Result, seconds: float) -> None:
        """Show a score. A set whose encodings were stored takes no time, and no longer counts."""
        self._encoded, self._current = self._encoded + self._current[1], (0, 0)
        self._waiting.pop(name, None)
        if self.silent:
            return
        metric = displayed_metric(result, self._metrics.get(name))
        self._bar.console.print(
            f"{escape_control_chars(name)}  {metric} {_score_with_span(result, metric)}  n = {result.n:,}  {duration(seconds)}",
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
        self._show("")

    def _show(self, place: str) -> None:
        if self.silent or self._task is None:
            return
        done = self._encoded + self._current[0]
        # Of the current set, its own total counts, because part of it may have been stored.
        sizes = [*self._waiting.values()]
        waiting = sum(sizes[1:] if self._current[1] else sizes)
        facts = f"set {self._sets - len(self._waiting) + (1 if self._waiting else 0)} of {self._sets} {place}".strip()
        self._bar.show(self._task, done, self._encoded + self._current[1] + waiting, facts)


def duration(seconds: float) -> str:
    """Format a time as 0.4 s, 12 s or 3:04 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def suite_table(
    results: Mapping[str, Mapping[str, Result]], metrics: Mapping[str, str | None], seconds: Mapping[str, float]
) -> Table:
    """Return a table with a row per set: its metric in the suite, and the score of each checkpoint with its interval.

    Args:
        results: by checkpoint and task.
        metrics: metric of each task in the suite; None: its headline.
        seconds: time that each task took, over all checkpoints.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("set", "metric", "n", "chance"):
        table.add_column(column, justify="left" if column in ("set", "metric") else "right", no_wrap=True)
    for name in results:
        table.add_column(heading(name), justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for task, metric in metrics.items():
        found = [by_task.get(task) for by_task in results.values()]
        first = next((result for result in found if result is not None), None)
        if first is None:
            continue
        displayed = displayed_metric(first, metric)
        luck = first.chance if displayed == first.headline else first.options.get(f"chance_{displayed}")
        cells = [
            "-" if result is None or displayed not in result.metrics else _score_with_span(result, displayed)
            for result in found
        ]
        chance = format_metric(displayed, luck) if isinstance(luck, float) else "-"
        time = duration(seconds[task]) if task in seconds else "-"
        table.add_row(task, displayed, f"{first.n:,}", chance, *cells, time)
    return table


def displayed_metric(result: Result, metric: str | None) -> str:
    """Return the metric of a suite if the result has it, otherwise its headline."""
    return metric if metric in result.metrics else result.headline


def _score_with_span(result: Result, metric: str) -> str:
    low, high = result.interval if metric == result.headline else result.intervals.get(metric, (None, None))
    span = "" if low is None or high is None else f" ({format_metric(metric, low)}–{format_metric(metric, high)})"
    return f"{format_metric(metric, result.metrics[metric], unit=True)}{MARK if result.odd() else ''}{span}"
