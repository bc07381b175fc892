"""Training time of a run over all its sittings, and the estimated rest."""

from __future__ import annotations

import time


class RunClock:
    """Counts from the start of this sitting, on top of what earlier sittings took.

    Args:
        before: seconds that earlier sittings took, from the checkpoint.
    """

    def __init__(self, before: float = 0.0):
        # Monotonic: a machine's clock may be set back while it trains.
        self._before, self._start_time = before, time.monotonic()
        self._first: tuple[int, float] | None = None  # this sitting's first finished step, and when
        self._away = 0.0  # seconds of evaluations and checkpoints since then

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, all sittings included."""
        return self._before + time.monotonic() - self._start_time

    def step(self, step: int) -> bool:
        """Note a finished step; return whether it is the first of this sitting."""
        if self._first is not None:
            return False
        self._first = (step, time.monotonic())
        return True

    def pause(self, seconds: float) -> None:
        """Leave seconds out of the estimate, which is for steps alone."""
        if self._first is not None:
            self._away += seconds

    def left(self, step: int, total: int) -> float | None:
        """Return an estimate of the seconds to the last step; None before two steps of this sitting are done.

        The first step is left out: it compiles, fills caches and waits for the loader's workers.
        """
        if self._first is None or step <= self._first[0]:
            return None
        first, at = self._first
        return (time.monotonic() - at - self._away) / (step - first) * (total - step)
