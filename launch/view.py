"""What a person sees: progress bars and tables (rich)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from evals.results import Result

console = Console(stderr=True)
out = Console()


class ProgressView:
    """A bar with loss, samples/s, data wait and ETA; plain lines every 15 s where the output is no terminal."""

    def __init__(self, title: str):
        self.title, self._last = title, 0.0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = None

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: int, total: int, facts: Mapping[str, float]) -> None:
        text = (
            f"loss {facts['loss']:.3f}  {facts['samples_per_second']:.0f} samples/s  data wait {facts['data_wait']:.0%}"
        )
        if self._task is None:
            self._task = self._bar.add_task(self.title, total=total, facts="")
        self._bar.update(self._task, completed=step, facts=text)
        if not console.is_terminal and (time.monotonic() - self._last > 15 or step == total):
            self._last = time.monotonic()
            console.print(f"{self.title}  step {step}/{total}  {text}")

    def say(self, text: str) -> None:
        console.print(f"{self.title}  {text}", highlight=False)


def results_table(results: Mapping[str, Mapping[str, Result]], title: str) -> Table:
    """Rows: (task, metric); columns: checkpoints; the headline comes first, its 95 % interval below it."""
    table = Table(title=title, title_justify="left")
    for column in ("task", "metric", "n", "chance", *results):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    tasks = dict.fromkeys(task for by_task in results.values() for task in by_task)
    for task in tasks:
        first = max((r[task] for r in results.values() if task in r), key=lambda r: len(r.metrics))
        found = [by_task.get(task) for by_task in results.values()]
        head = [_percent(r.value) if r else "-" for r in found]
        table.add_row(task, first.headline, str(first.n), _percent(first.chance), *head, style="bold")
        table.add_row(
            "",
            "  95 %",
            "",
            "",
            *(f"{_percent(r.interval[0])}–{_percent(r.interval[1])}" if r else "-" for r in found),
        )
        for metric in first.metrics:
            if metric != first.headline:
                table.add_row(
                    "",
                    metric,
                    "",
                    "",
                    *(_percent(r.metrics[metric]) if r and metric in r.metrics else "-" for r in found),
                )
        table.add_section()
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
