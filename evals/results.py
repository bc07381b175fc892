"""One result: metrics with n, an interval on the headline, and the chance level."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Result(NamedTuple):
    """A scored task.

    metrics: fractions in 0..1 by name.  headline: the metric to show first.  n: items behind it.
    interval: Wilson 95 % interval of the headline.  chance: its value for random guessing.
    """

    task: str
    n: int
    headline: str
    metrics: dict[str, float]
    chance: float

    @property
    def value(self) -> float:
        return self.metrics[self.headline]

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.value, self.n)

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "interval": list(self.interval)}


def wilson(p: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927) at 95 %."""
    if n == 0:
        return 0.0, 1.0
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
