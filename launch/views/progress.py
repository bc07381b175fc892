"""Progress in the terminal (rich), and the report of `sparo data check`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sparo_data.check import Report, check
from sparo_train.core.disk.metrics import straggler
from sparo_train.core.files import escape_control_chars
from sparo_train.data.decode.bands import PixelRange
from sparo_train.data.examples.survey import Survey
from sparo_train.data.sources.base import SourceConfig, Storage

from .terminal import console, logs_on_terminal

_LINE_INTERVAL = 15.0  # seconds between lines without a terminal


class Bar(Progress):
    """A progress bar with the time left; without a terminal, a line every 15 s.

    Args:
        own_clock: the caller passes times to `clock`, as in a run that continues an earlier one.
    """

    def __init__(self, own_clock: bool = False) -> None:
        own = (TextColumn("{task.fields[clock]}", markup=False),)
        times = (TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            *(own if own_clock else times),
            console=console,
            disable=not console.is_terminal,
        )
        self._printed = time.monotonic()

    def start_task_named(self, description: str, total: float | None = None) -> TaskID:
        """Add a task; without a terminal, print its name."""
        if not console.is_terminal:
            console.print(f"{description} …")
        return self.add_task(escape_control_chars(description), total=total, facts="", clock="")

    def clock(self, task: TaskID, done: float, total: float, elapsed: float, left: float | None, first: bool) -> None:
        """Show a count with its times; without a terminal, the first one is printed at once."""
        times = f"{timedelta(seconds=round(elapsed))} elapsed"
        times += "" if left is None else f", {timedelta(seconds=round(left))} left"
        self.update(task, completed=done, total=total, clock=times)
        now = time.monotonic()
        if not console.is_terminal and (first or now - self._printed > _LINE_INTERVAL):
            self._printed = now
            facts = self.tasks[task].fields["facts"]
            console.print(
                f"{self.tasks[task].description}  {done:.0f}/{total:.0f}  {facts}{'  ' if facts else ''}{times}",
                soft_wrap=True,
            )

    def show(self, task: TaskID, done: float, total: float | None = None, facts: str = "") -> None:
        """Show the progress of a task."""
        self.update(task, completed=done, total=total, facts=facts)
        now = time.monotonic()
        if not console.is_terminal and (now - self._printed > _LINE_INTERVAL or done == total):
            self._printed = now
            spent, left = self.tasks[task].elapsed, self.tasks[task].time_remaining
            rest = f"  {timedelta(seconds=round(spent))} elapsed" if spent else ""
            rest += f", {timedelta(seconds=round(left))} left" if left else ""
            console.print(
                f"{self.tasks[task].description}  {done:.0f}{'' if total is None else f'/{total:.0f}'}  {facts}{rest}".rstrip(),
                soft_wrap=True,
            )

    def facts(self, task: TaskID, text: str) -> None:
        """Show the activity of a task without a count."""
        self.update(task, facts=text)
        if not console.is_terminal and time.monotonic() - self._printed > _LINE_INTERVAL:
            self._printed = time.monotonic()
            console.print(f"{self.tasks[task].description}  {text}", soft_wrap=True)


class ProgressView:
    """Progress of a training: loss, samples/s, data wait and the time left, below the log.

    `silent`: for ranks other than the first.
    """

    def __init__(self, title: str, silent: bool = False):
        self.title, self.silent = title, silent
        self._bar = Bar(own_clock=True)
        self._task: TaskID | None = None
        self._step_displayed = False
        self._times: tuple[float, float | None] = (0.0, None)
        self._stack = ExitStack()

    def __enter__(self) -> ProgressView:
        if not self.silent:
            self._stack.enter_context(logs_on_terminal(self.title))
            self._stack.enter_context(self._bar)
        return self

    def _bar_task(self) -> TaskID:
        if self._task is None:
            self._task = self._bar.start_task_named(self.title)
        return self._task

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def update(self, step: int, total: int, facts: Mapping[str, float]) -> None:
        if self.silent:
            return
        text = (
            f"loss {facts['loss']:.3f}  {facts['samples_per_second']:.0f} samples/s  data wait {facts['data_wait']:.0%}"
        )
        if slow := straggler(facts):
            text += f"  {slow}"
        task = self._bar_task()
        self._bar.update(task, facts=text)
        self._bar.clock(task, step, total, *self._times, first=step == total)

    def show_progress(self, step: int, total: int, elapsed: float, left: float | None) -> None:
        """Show the step, the time over all starts and the estimated rest."""
        if self.silent:
            return
        self._times = (elapsed, left)
        if step < total:  # the last step's metrics follow
            self._bar.clock(self._bar_task(), step, total, elapsed, left, first=not self._step_displayed)
        self._step_displayed = True

    def phase(self, text: str) -> None:
        """Show an activity other than steps; without a terminal, print a line if the last one is old."""
        if not self.silent:
            self._bar.facts(self._bar_task(), text)


_MAX_KEYS = 5
_KINDS = ("keys", "images", "captions", "looks")


def check_with_bar(
    storages: Sequence[Storage],
    config: SourceConfig,
    processes: int,
    pixel_range: PixelRange,
    bands: tuple[int, ...] | None,
) -> Report:
    """Run `check` with a bar over shards."""
    with Bar() as bar:
        task = bar.start_task_named("checking shards", len(storages))
        return check(storages, config, processes, lambda done: bar.show(task, done, len(storages)), pixel_range, bands)


def check_lines(report: Report) -> list[str]:
    """Return the totals, and then each shard with problems, with its full name."""
    lines = _totals(report)
    for shard in report.shards:
        if not shard.bad and not shard.damage:
            continue
        lines.append(f"{shard.url}: {shard.samples} samples, {len(shard.bad)} broken")
        if shard.damage:
            lines.append(f"  {shard.damage}")
        by_reason: dict[str, list[str]] = {}
        for key, reason in shard.bad:
            detail = shard.details.get(key)
            by_reason.setdefault(reason, []).append(f"{key}: {detail}" if detail else key)
        for reason, keys in by_reason.items():
            more = " …" if len(keys) > _MAX_KEYS else ""
            lines.append(f"  {reason}: {len(keys)} ({', '.join(keys[:_MAX_KEYS])}{more})")
    return lines


def check_facts(report: Report) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "shards": len(report.shards),
        "samples": report.samples,
        "broken": report.reasons(),
        "notes": report.notes(),
        "survey": None if (survey := report.survey()) is None else survey._asdict(),
        "duplicates": {name: getattr(report, name)._asdict() for name in _KINDS},
        "bad": {s.url: [list(pair) for pair in s.bad] for s in report.shards if s.bad},
        "damaged": {s.url: s.damage for s in report.shards if s.damage},
    }


def _survey_lines(survey: Survey) -> list[str]:
    """Return formats, sizes and colours, the last as keys of a recipe."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in survey.kinds.items())
    sizes = "; ".join(
        f"{what} {low} to {high} (5 %: {p5}, median {p50}, 95 %: {p95})"
        for what, (low, p5, p50, p95, high) in (("width", survey.widths), ("height", survey.heights))
    )
    gray = f"; {survey.gray:.0%} of images are gray" if survey.gray else ""
    mean, std = (str(list(values)).replace(" ", "") for values in (survey.mean, survey.std))
    lines = [f"formats: {kinds}", f"pixels: {sizes}"]
    if survey.low:
        ranges = str([list(pair) for pair in survey.ranges]).replace(" ", "")
        lines.append(f"1st to 99th percentile of each band: data.pixel_range={ranges}")
    if survey.full_range is not None:
        lines.append(
            f"images with more than 8 bits use {survey.used_bits} of them only, so training would see them dark. Set "
            f"data.pixel_range=[0,{survey.full_range[1]}], and measure the colours again with --pixel-range [0,{survey.full_range[1]}]."
        )
    return [*lines, f"colours: objective.mean={mean} objective.std={std}{gray}"]


def _totals(report: Report) -> list[str]:
    broken = ", ".join(f"{r}: {n}" for r, n in report.reasons().items()) or "nothing broken"
    lines = [f"{len(report.shards)} shards, {report.samples} samples; {broken}"]
    if notes := report.notes():
        lines.append("usable, but unusual: " + ", ".join(f"{n} {note}" for note, n in notes.items()))
    if (survey := report.survey()) is not None:
        lines += _survey_lines(survey)
    for name in _KINDS:
        duplicates = getattr(report, name)
        if name == "looks" and duplicates.copies <= report.images.copies:
            continue
        if name == "captions" and not any(shard.captions.any() for shard in report.shards):
            lines.append("captions: none were read")
            continue
        example = duplicates.examples[0] if duplicates.examples else []
        examples_text = ", e.g. " + " = ".join(f"{url}:{key}" for url, key in example[:2]) if example else ""
        what = "similar images, duplicates included" if name == "looks" else f"duplicate {name}"
        lines.append(f"{what}: {duplicates.copies}{examples_text}")
    # The most common mistake, with its remedy.
    if report.samples and report.reasons().get("missing caption") == report.samples:
        detail = next((text for shard in report.shards for text in shard.details.values()), "")
        lines.append(
            f"No sample has a caption{f': {detail}' if detail else ''}. Use --caption-key NAME for captions in another member or column, and "
            "--caption-key '' for images without captions."
        )
    return lines
