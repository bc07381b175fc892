"""How many threads a training on a CPU takes, where neither the recipe nor the environment says it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_STAT = Path("/proc/stat")


def fitting_threads(window: float = 0.3) -> int:
    """Return a number of threads that leaves cores which other programs use to them; torch's own where that is not known.

    Threads of one operation wait for each other, so one that shares its core with another program holds up all of them.

    Args:
        window: seconds that the load is looked at.
    """
    own = torch.get_num_threads()
    if (busy := busy_cores(window)) is None:
        return own
    return max(1, min(own, round((os.cpu_count() or own) - busy)))


def busy_cores(window: float) -> float | None:
    """Return how many cores other processes used on average in the next `window` seconds; None where Linux does not say."""
    before, own = _ticks(), time.process_time()
    time.sleep(window)
    after, own = _ticks(), time.process_time() - own
    if before is None or after is None or after[1] <= before[1]:
        return None
    share = (after[0] - before[0]) / (after[1] - before[1])
    return max(0.0, share * (os.cpu_count() or 1) - own / window)


def _ticks() -> tuple[int, int] | None:
    """Return ticks of all cores since the start of the machine: those at work, and all."""
    try:
        counts = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(counts) < 5:
        return None
    return sum(counts) - counts[3] - counts[4], sum(counts)  # without idle and iowait
