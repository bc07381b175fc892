"""Schedules as functions of the step; values equal those of the arrays that published code precomputes."""

from __future__ import annotations

import math


def cosine(start: float, end: float, step: int, total: int) -> float:
    """Return half a cosine from `start` at step 0 to `end` at step `total`, which is not reached itself (DINO's `cosine_scheduler`)."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(1.0, step / max(1, total))))


def linear(start: float, end: float, step: int, count: int) -> float:
    """Return entry `step` of `numpy.linspace(start, end, count)`."""
    # The last entry is exactly `end`, as in linspace, not the rounded sum.
    return (
        start if count < 2 or step == 0 else end if step == count - 1 else start + step * ((end - start) / (count - 1))
    )


def cool_down(start: float, end: float, step: int, total: int, shape: str) -> float:
    """Decay from `start` (at step 0 and before) to `end` at step `total`, which is not reached itself: linearly, or by `1 - sqrt(progress)`."""
    done = min(1.0, max(step, 0) / total)
    return start + (end - start) * (done if shape == "linear" else done**0.5)
