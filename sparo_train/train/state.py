"""What the loop carries, shows and ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..core.contracts import Cursor, Objective
from ..core.distributed import Ranks

# Scores by task, for metrics.jsonl; the ranks are those that score together.
Evaluate = Callable[[Objective, int, Ranks], dict[str, Any]]


class Display(Protocol):
    """Shows a human what happens."""

    def show_progress(self, step: int, total: int, elapsed: float, left: float | None) -> None:
        """Show the step, the seconds of training so far over all sittings, and an estimate of those left."""

    def update(self, step: int, total: int, facts: dict[str, float]) -> None:
        """Show the metrics of a log step."""

    def phase(self, text: str) -> None:
        """Show an activity other than steps."""


class NoDisplay:
    """A display that shows nothing, as a context: for a training whose log is enough."""

    def __init__(self, name: str, silent: bool):
        pass

    def __enter__(self) -> NoDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show_progress(self, step: int, total: int, elapsed: float, left: float | None) -> None:
        pass

    def update(self, step: int, total: int, facts: dict[str, float]) -> None:
        pass

    def phase(self, text: str) -> None:
        pass


@dataclass
class State:
    """What the loop carries from step to step, beside the engine's own state."""

    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    cursor: Cursor | None = None
    steps_before: int = 0  # of the runs that this one is a branch of
    seconds: float = 0.0  # of training, all sittings included, at the newest checkpoint

    def counts(self) -> dict[str, float]:
        """Return the entries of a checkpoint's meta other than the step and the cursors."""
        return {
            "samples": self.samples,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "steps_before": self.steps_before,
            "seconds": round(self.seconds, 3),
        }

    @staticmethod
    def of(meta: Mapping[str, Any]) -> State:
        """As it was when a checkpoint was written."""
        cursor = Cursor(tuple(meta["cursor"]))
        # Older versions wrote no steps_before, and their branches went on as if there were none.
        before, seconds = meta.get("steps_before", 0), float(meta.get("seconds", 0.0))
        counts = (meta["step"], meta["samples"], meta["skipped_steps"], meta["skipped_in_a_row"])
        return State(*counts, cursor, before, seconds)


@dataclass(frozen=True)
class Outcome:
    """Why the loop ended: `finished`, `stop_after_steps`, or a signal's name; and where."""

    reason: str
    step: int
    checkpoint: Path | None
