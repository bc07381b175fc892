"""State of the loop, displays, and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..core.contracts import Cursor, DataPipeline, Engine, Objective
from ..core.disk.rundir import RunDir
from ..core.distributed import Ranks
from .run_config import RunConfig

# Scores by task, for metrics.jsonl; the ranks are those that evaluate together.
Evaluate = Callable[[Objective, int, Ranks], dict[str, Any]]


class Run(NamedTuple):
    """A training on one rank, before its first step.

    Attributes:
        config: the resolved recipe.
        ranks: this process among those that train together.
        engine, objective, pipeline: parts of the training.
        rundir: run folder; nothing is written to it yet.
        total_steps, steps_per_epoch: length of the schedules.
    """

    config: RunConfig
    ranks: Ranks
    engine: Engine
    objective: Objective
    pipeline: DataPipeline
    rundir: RunDir
    total_steps: int
    steps_per_epoch: int


class Display(Protocol):
    """Display of progress for a user."""

    def show_progress(self, step: int, total: int, elapsed: float, left: float | None) -> None:
        """Show the step, the seconds of training so far over all starts, and an estimate of those left."""

    def update(self, step: int, total: int, facts: dict[str, float]) -> None:
        """Show the metrics of a log step."""

    def phase(self, text: str) -> None:
        """Show an activity other than steps."""


class NoDisplay:
    """Display that shows nothing, as a context: for trainings whose log is enough."""

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
    """State that the loop carries from step to step, in addition to the engine's own state."""

    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    cursor: Cursor | None = None
    steps_before: int = 0  # of the run that this one branched from
    seconds: float = 0.0  # seconds of training over all starts, at the newest checkpoint

    def meta(self, cursors: Sequence[Cursor | None], bad_samples: Any, kernel: str) -> dict[str, Any]:
        """Return the entries of a checkpoint's meta that change from step to step.

        Args:
            cursors: of all ranks, in rank order.
            bad_samples: from `BadSampleBudget.state`.
            kernel: of attention.
        """
        joined = Cursor.join([cursor for cursor in cursors if cursor is not None])
        return {
            **self.counts(),
            "cursor": joined.to_json(),
            "bad_samples": bad_samples,
            # Needed by a resumed run to sum in the same order.
            "attention": kernel,
            "threads": torch.get_num_threads(),
        }

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
    def from_meta(meta: Mapping[str, Any]) -> State:
        """Return the state that a checkpoint's meta records."""
        cursor = Cursor(tuple(meta["cursor"]))
        # Older versions wrote no steps_before, and their branches continued as if it were zero.
        before, seconds = meta.get("steps_before", 0), float(meta.get("seconds", 0.0))
        counts = (meta["step"], meta["samples"], meta["skipped_steps"], meta["skipped_in_a_row"])
        return State(*counts, cursor, before, seconds)


@dataclass(frozen=True)
class Outcome:
    """Reason for the end of the loop (`finished`, `stop_after_steps`, or a signal's name) and its step."""

    reason: str
    step: int
    checkpoint: Path | None
