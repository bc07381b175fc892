"""What the loop carries, shows and ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..core.contracts import Cursor, Objective

Evaluate = Callable[[Objective, int], dict[str, Any]]  # scores by task, for metrics.jsonl


class Display(Protocol):
    """Shows a human what happens."""

    def update(self, step: int, total: int, facts: dict[str, float]) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass
class State:
    """What the loop carries from step to step, beside the engine's own state."""

    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    cursor: Cursor | None = None


@dataclass(frozen=True)
class Outcome:
    """Why the loop ended: `finished`, `stop_after_steps`, or a signal's name; and where."""

    reason: str
    step: int
    checkpoint: Path | None
