"""How fast it goes and how long it waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


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


class Meter:
    """Samples per second and the share of time spent waiting for data, between two calls of `take`."""

    def __init__(self) -> None:
        self.start()
        self._beat = 0.0

    def start(self) -> None:
        # Monotonic: the clock of a machine may be set back while it trains.
        self._since, self._waited, self._samples, self._steps = time.monotonic(), 0.0, 0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - begin

    def add(self, samples: int) -> None:
        self._samples, self._steps = self._samples + samples, self._steps + 1

    def take(self) -> dict[str, float]:
        """`samples_per_second`, `data_wait` (share) and `step_seconds`, from here on anew."""
        # Two log steps within a clock tick must not divide by zero.
        spent = max(time.monotonic() - self._since, 1e-9)
        out = {
            "samples_per_second": self._samples / spent,
            "data_wait": self._waited / spent,
            "step_seconds": spent / max(1, self._steps),
        }
        self.start()
        return out

    def beat_due(self, seconds: float) -> bool:
        now = time.monotonic()
        due = now - self._beat >= seconds
        if due:
            self._beat = now
        return due


def average_over_ranks(facts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over ranks, and `step_spread`: how much longer the slowest rank's forward takes than the fastest's, as a share.

    Forwards are compared because nothing in them waits for other ranks; whole steps take equally long on all of them.
    """
    # A metric that a rank's batch has nothing of is the mean of those that have it.
    values_by_name = {
        name: [f[name] for f in facts if name in f] for name in dict.fromkeys(name for f in facts for name in f)
    }
    out = {name: sum(values) / len(values) for name, values in values_by_name.items()}
    # Not whole steps: whoever is faster waits in the exchange, and all would look alike.
    own = [f["forward_seconds"] for f in facts]
    if len(facts) > 1:
        out["step_spread"] = max(own) / max(min(own), 1e-9) - 1
    return out
