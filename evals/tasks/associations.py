"""Scores of associations (WinoGAViL; Bitton et al. 2022): which images of several does a word go with?"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from torch import Tensor

from .result import Result, bootstrap, percentiles


def jaccard(similarity: Tensor, right: int) -> Tensor:
    """Return the Jaccard index (b,) between the right images and the top of the ranking, as many images; ties lose.

    Args:
        similarity: (b, m), of a word to m images; the first `right` images belong to it.
        right: number of right images; with 0, the index is 0.
    """
    # The wrong images first, because a stable sort keeps the order of ties.
    order = similarity.roll(-right, dims=1).sort(dim=1, descending=True, stable=True).indices
    hits = (order[:, :right] >= similarity.shape[1] - right).sum(dim=1)
    return hits.double() / (2 * right - hits).clamp(min=1)


def chance(images: int, right: int) -> float:
    """Return the expected Jaccard index of a random choice of `right` images."""
    choices = comb(images, right)
    return sum(
        comb(right, hits) * comb(images - right, right - hits) / choices * hits / (2 * right - hits)
        for hits in range(1, right + 1)
    )


def score(values: Tensor, chances: Sequence[float], kinds: Sequence[str], headline: str) -> Result:
    """Return the mean index over all questions, and over those of each kind, as `jaccard/KIND`.

    Args:
        values: the index of each question (n,).
        chances: its expected value for a random choice.
        kinds: kind of each question.
        headline: metric that tables show.

    Raises:
        KeyError: the headline names a kind that no question has.
    """
    rows, table, luck = values.numpy(), np.asarray(kinds), np.asarray(chances)
    parts = {"jaccard": np.ones(len(rows), bool)} | {f"jaccard/{k}": table == k for k in dict.fromkeys(kinds) if k}
    metrics = {name: float(rows[part].mean()) for name, part in parts.items()}
    intervals = {name: _interval(rows[part]) for name, part in parts.items()}
    by_name = {name: float(luck[part].mean()) for name, part in parts.items()}
    options = {f"chance_{name}": value for name, value in by_name.items() if name != headline}
    predictions = {"jaccard": rows, "kind": table}
    count = int(parts[headline].sum())
    return Result("associations", count, headline, metrics, by_name[headline], intervals, options, {}, predictions)


def _interval(values: np.ndarray) -> tuple[float, float]:
    return percentiles(bootstrap(values[:, None], np.ones((len(values), 1)))[:, 0])
