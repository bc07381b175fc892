"""The loss of held-out samples, one by one, as training has it."""

from __future__ import annotations

import numpy as np

from .result import Result, bootstrap, percentiles


def score(losses: np.ndarray) -> Result:
    """The mean of losses (n,) with an interval that resamples samples. Smaller is better; there is no chance level."""
    table = losses.astype(np.float64)[:, None]
    draws = bootstrap(table, np.ones_like(table))
    return Result(
        "validation_loss",
        len(losses),
        "loss",
        {"loss": float(table.mean())},
        0.0,
        {"loss": percentiles(draws[:, 0])},
        {"mean": "over samples"},
        predictions={"loss": losses.astype(np.float32)},
    )
