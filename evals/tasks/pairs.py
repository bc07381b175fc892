"""True caption against false caption, as scored in SugarCrepe: strictly greater similarity wins, ties lose."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from .clusters import assign_clusters, share_interval
from .result import DRAWS, Result, percentiles, wilson


def score(
    image: Tensor,
    true: Tensor,
    false: Tensor,
    kinds: Sequence[str],
    average: Literal["macro", "micro"] = "macro",
    texts: Sequence[tuple[str, str]] = (),
    owners: Sequence[Hashable] = (),
) -> Result:
    """Return the accuracy per kind, their unweighted mean (`macro`) and that over all pairs (`micro`).

    Args:
        image, true, false: (n, D) encodings of each pair's image and captions.
        kinds: kind of each pair, e.g. `swap_att`.
        average: the headline. Table B.1 of the SPARO paper has the macro average; SugarCrepe's authors use micro.
        texts: true and false caption of each pair; pairs with the same words in another order are also scored
            separately, as `order_only`, on which an encoder that ignores order guesses.
        owners: image of each pair; intervals allow for dependent answers about one image. Default: independent.
    """
    image = F.normalize(image.float(), dim=-1)
    # As one difference, so that rounding of a common part cannot decide.
    margin = (image * (F.normalize(true.float(), dim=-1) - F.normalize(false.float(), dim=-1))).sum(dim=1)
    return score_margins(margin, kinds, average, texts, owners)


def score_margins(
    margin: Tensor,
    kinds: Sequence[str],
    average: Literal["macro", "micro"] = "macro",
    texts: Sequence[tuple[str, str]] = (),
    owners: Sequence[Hashable] = (),
) -> Result:
    """Return the same from margins (n,): similarity to the true caption minus that to the false one."""
    right, rng = (margin > 0).numpy(), np.random.default_rng(0)
    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    draws = []
    table = np.asarray(kinds)
    for kind in dict.fromkeys(kinds):
        here = right[table == kind]
        metrics[kind] = float(here.mean())
        intervals[kind] = wilson(metrics[kind], len(here))
        draws.append(
            rng.binomial(len(here), metrics[kind], DRAWS) / len(here)
        )  # equivalent to a bootstrap within the kind
    metrics |= {"macro": sum(metrics.values()) / len(metrics), "micro": float(right.mean())}
    intervals |= {"macro": percentiles(np.mean(draws, axis=0)), "micro": wilson(metrics["micro"], len(right))}
    counts = {"ties": int((margin == 0).sum())}
    # The same words in another order, which a bag of words cannot distinguish.
    same = np.asarray([_words(a) == _words(b) for a, b in texts], dtype=bool)
    if same.any():
        metrics["order_only"] = float(right[same].mean())
        intervals["order_only"] = wilson(metrics["order_only"], int(same.sum()))
        counts["order_only"] = int(same.sum())
    options = {"average": average, "ties": "lose", "macro_interval": "bootstrap within kind"}
    predictions = {"margin": margin.numpy(), "right": right, "kind": table}
    if (clusters := assign_clusters([[owner] for owner in owners]) if owners else None) is not None:
        intervals = _over_clusters(right, table, same, clusters, intervals)
        predictions["cluster"], counts["clusters"] = clusters, int(clusters.max()) + 1
        options["macro_interval"] = "effective number of answers"
    return Result("pairs", len(kinds), average, metrics, 0.5, intervals, options, counts, predictions)


def _over_clusters(
    right: np.ndarray,
    kinds: np.ndarray,
    same: np.ndarray,
    clusters: np.ndarray,
    names: Iterable[str],
) -> dict[str, tuple[float, float]]:
    """Return the intervals of the metrics `names` for pairs that share images."""
    everywhere = np.ones(len(right), bool)
    rows = {"macro": everywhere, "micro": everywhere, "order_only": same}
    found = {}
    for name in names:
        here = rows.get(name, kinds == name)
        strata = kinds if name == "macro" else np.zeros(len(right))
        found[name] = share_interval(right[here], strata[here], clusters[here])
    return found


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"[\w']+", text.lower()))
