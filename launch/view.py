"""What a person sees: progress bars and tables (rich)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from evals.results import Result

console = Console(stderr=True)
out = Console()
_PLAIN_EVERY = 15.0  # seconds between lines where the output is no terminal


class Bar(Progress):
    """A progress bar with what is left; a line every 15 s where the output is no terminal."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._printed = time.monotonic()

    def start_task_named(self, description: str, total: float | None = None) -> TaskID:
        """Add a task; without a terminal its name is printed."""
        if not console.is_terminal:
            console.print(f"{description} …", highlight=False)
        return self.add_task(description, total=total, facts="")

    def show(self, task: TaskID, done: float, total: float | None = None, facts: str = "") -> None:
        """Where a task stands."""
        self.update(task, completed=done, total=total, facts=facts)
        now = time.monotonic()
        if not console.is_terminal and (now - self._printed > _PLAIN_EVERY or done == total):
            self._printed = now
            left = self.tasks[task].time_remaining
            rest = f"  {timedelta(seconds=round(left))} left" if left else ""
            console.print(
                f"{self.tasks[task].description}  {done:.0f}/{total or 0:.0f}  {facts}{rest}".rstrip(),
                highlight=False,
                soft_wrap=True,
            )


class ProgressView:
    """Training as a person sees it: loss, samples/s, data wait and what is left; what is said also goes to `log`.

    `silent`: for ranks other than the first.
    """

    def __init__(self, title: str, log: Path, silent: bool = False):
        self.title, self.log, self.silent = title, log, silent
        self._bar = Bar()
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressView:
        if not self.silent:
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
        if self.silent:
            return
        if self._task is None:
            self._task = self._bar.start_task_named(self.title, total)
        self._bar.show(self._task, step, total, text)

    def say(self, text: str) -> None:
        if not self.silent:
            console.print(f"{self.title}  {text}", highlight=False, soft_wrap=True)
        self.note(text)

    def note(self, text: str) -> None:
        """A line for RUN/log.txt only."""
        if self.silent:
            return
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(f"{datetime.now().isoformat(timespec='seconds')}  {text}\n")


def results_table(results: Mapping[str, Mapping[str, Result]], title: str) -> Table:
    """Rows: (task, metric); columns: checkpoints; the headline comes first, its 95 % interval below it."""
    table = Table(title=title, title_justify="left")
    for column in ("task", "metric", "n", "chance", *results):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", overflow="fold")
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
