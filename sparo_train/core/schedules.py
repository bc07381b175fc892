"""Schedules as functions of the step: every value is that of the array which published code precomputes."""

from __future__ import annotations

import math


def cosine(start: float, end: float, step: int, total: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at step `total`, which itself is not reached (DINO's `cosine_scheduler`)."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(1.0, step / max(1, total))))


def linear(start: float, end: float, step: int, count: int) -> float:
    """Entry `step` of `numpy.linspace(start, end, count)`."""
    # The last entry is `end` to the bit, as linspace gives it, not what the sum rounds to.
    return (
        start if count < 2 or step == 0 else end if step == count - 1 else start + step * ((end - start) / (count - 1))
    )


def cooled(start: float, end: float, step: int, total: int, shape: str) -> float:
    """From `start`, at step 0 and before, down to `end` at step `total`, which itself is not reached: a line, or `1 - sqrt` of what is done."""
    done = min(1.0, max(step, 0) / total)
    return start + (end - start) * (done if shape == "linear" else done**0.5)
