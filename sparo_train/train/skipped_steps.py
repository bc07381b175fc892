"""Steps whose gradient was not finite: counted, told, and the end of a run that has too many in a row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ..core.contracts import StepReport
from ..core.disk import checkpoint_store as store
from ..core.errors import TrainingError
from .state import State

logger = logging.getLogger(__name__)

_LAST = 2  # steps that may be skipped at the end: a single overflow in bf16 does not mean that the run diverged


def refuse_diverged(state: State, total_steps: int, checkpoint: Path | None, last_good: str) -> None:
    """Raise `TrainingError` at the end of a run that diverged.

    Its weights are not finite or above 1e9, it skipped half of its steps or more, or the last three of them.
    """
    sound = checkpoint is None or store.has_sound_weights(checkpoint)
    at_the_end = state.skipped_in_a_row > _LAST
    if sound and 2 * state.skipped_steps < max(state.step, 1) and not at_the_end:
        return
    causes = [] if sound else ["its weights are not finite or above 1e9"]
    if state.skipped_steps:
        last = f", the last {state.skipped_in_a_row} among them" if at_the_end else ""
        causes.append(f"{state.skipped_steps} of {state.step} steps were skipped as non-finite{last}")
    raise TrainingError(
        f"step {state.step} of {total_steps} is done, but {' and '.join(causes)}. "
        f"Lower optim.lr, set optim.clip_grad_norm=1.0 or engine.precision=fp32; {last_good}."
    )


class SkippedSteps:
    """What became of the steps since the host last looked.

    On a CPU it looks after every step. A GPU would have to be waited for: there it looks where it waits anyway (log steps, saves,
    the end), so a run may take a few steps more before it ends.

    Args:
        limit: `optim.max_consecutive_skips`.
        last_good: returns the last good checkpoint in words, for the error.
    """

    def __init__(self, limit: int, last_good: Callable[[], str]):
        self.limit, self._last_good = limit, last_good
        self._pending: list[tuple[int, bool | Tensor, Tensor]] = []

    def add(self, step: int, report: StepReport) -> None:
        """Note a step that was taken; `step` counts it."""
        self._pending.append((step, report.applied, report.grad_norm))

    def needs_no_sync(self) -> bool:
        """Whether looking waits for nothing."""
        return all(isinstance(applied, bool) for _, applied, _ in self._pending)

    def look(self, state: State) -> None:
        """Count what happened into `state`. Raises `TrainingError` over the limit."""
        pending, self._pending = self._pending, []
        for step, applied, norm in pending:
            if bool(applied):
                state.skipped_in_a_row = 0
                continue
            state.skipped_steps += 1
            state.skipped_in_a_row += 1
            # At once, not at the end: whoever watches can still lower the rate.
            logger.warning(
                f"step {step}: gradient norm is {float(norm)}; step skipped ({state.skipped_in_a_row} in a row)"
            )
            if state.skipped_in_a_row > self.limit:
                raise TrainingError(
                    f"step {step}: {state.skipped_in_a_row} non-finite steps in a row (optim.max_consecutive_skips={self.limit}). "
                    f"Lower optim.lr, set optim.clip_grad_norm=1.0 or engine.precision=fp32; {self._last_good()}."
                )
