"""Progress as a person sees it (rich)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sparo_train.core.untrusted import shown

from .terminal import console

_PLAIN_EVERY = 15.0  # seconds between lines where the output is no terminal


class Bar(Progress):
    """A progress bar with what is left; a line every 15 s where the output is no terminal."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TextColumn("elapsed"),
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
            console.print(f"{description} …")
        return self.add_task(shown(description), total=total, facts="")

    def show(self, task: TaskID, done: float, total: float | None = None, facts: str = "") -> None:
        """Where a task stands."""
        self.update(task, completed=done, total=total, facts=facts)
        now = time.monotonic()
        if not console.is_terminal and (now - self._printed > _PLAIN_EVERY or done == total):
            self._printed = now
            spent, left = self.tasks[task].elapsed, self.tasks[task].time_remaining
            rest = f"  {timedelta(seconds=round(spent))} elapsed" if spent else ""
            rest += f", {timedelta(seconds=round(left))} left" if left else ""
            console.print(
                f"{self.tasks[task].description}  {done:.0f}{'' if total is None else f'/{total:.0f}'}  {facts}{rest}".rstrip(),
                soft_wrap=True,
            )

    def facts(self, task: TaskID, text: str) -> None:
        """What a task is doing, where it is not counted."""
        self.update(task, facts=text)
        if not console.is_terminal and time.monotonic() - self._printed > _PLAIN_EVERY:
            self._printed = time.monotonic()
            console.print(f"{self.tasks[task].description}  {text}", soft_wrap=True)


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

    def phase(self, text: str) -> None:
        """What is done in place of steps; without a terminal a line where the last one is some time ago."""
        if self.silent:
            return
        if self._task is None:
            self._task = self._bar.start_task_named(self.title)
        self._bar.facts(self._task, text)

    def say(self, text: str) -> None:
        if not self.silent:
            console.print(f"{self.title}  {text}", soft_wrap=True)
        self.note(text)

    def note(self, text: str) -> None:
        """A line for RUN/log.txt only."""
        if self.silent:
            return
        with suppress(OSError), self.log.open("a", encoding="utf-8", errors="replace") as stream:  # it only reports
            stream.write(f"{datetime.now().isoformat(timespec='seconds')}  {shown(text)}\n")
