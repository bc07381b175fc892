"""Intervals of accuracies whose answers are not independent, such as questions about one image or images of one patient.

The answers of a cluster may depend on each other; clusters are independent. The standard error is that of a sum over
clusters (Liang and Zeger 1986). An accuracy has Wilson's interval for the effective number of answers: as many
independent ones would have the same standard error (Kish 1965).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.special import ndtr
from torch import Tensor

from .result import Z, wilson

_SHADOWS = 8  # numbers by which rows are compared
_NEAR = 1e-5  # difference of equal rows that were computed in other batches, as a share of their spread


def first_copies(blocks: Iterable[Tensor]) -> list[int]:
    """Return for each row the number of the first row that is equal up to rounding: a set may contain an image several times.

    An encoder that gives every image the same encoding does not show which images are copies; then none are.

    Args:
        blocks: encodings (n_i, D) of images, in order.
    """
    shadows, directions = [], None
    for block in blocks:
        rows = block.flatten(1).double()
        if directions is None:
            directions = torch.randn(rows.shape[1], _SHADOWS, generator=torch.Generator().manual_seed(0)).double()
        # Equal projections on random directions mean equal rows.
        shadows.append(rows @ directions)
    if not shadows:
        return []
    table = torch.cat(shadows).numpy()
    order, n = table[:, 0].argsort(kind="stable"), len(table)
    # Relative to the differences between images, which are small for a model that has learned little.
    ordered, near = table[order], _NEAR * table.std(0).mean()
    # A row that is not a copy may lie between two copies in the order of the first projection.
    pairs = [
        np.stack([order[:-step][equal], order[step:][equal]])
        for step in range(1, min(n, 5))
        if (equal := (np.abs(ordered[step:] - ordered[:-step]) <= near).all(1)).any()
    ]
    rows, columns = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), np.int64)
    graph = coo_matrix((np.ones(len(rows), bool), (rows, columns)), (n, n))
    groups = connected_components(graph, directed=False)[1]
    return np.unique(groups, return_index=True)[1][groups].tolist() if groups.any() else list(range(n))


def assign_clusters(names: Sequence[Iterable[Hashable]]) -> np.ndarray | None:
    """Return the cluster of each of n answers, (n,) int64, or None if no two share a name.

    Answers with a name in common are in one cluster, and so are answers that are connected through others.

    Args:
        names: what each answer is about, such as the files of its images.
    """
    number: dict[Hashable, int] = {}
    pairs = [(row, number.setdefault(name, len(number))) for row, of in enumerate(names) for name in of]
    rows, columns = np.asarray(pairs, np.int64).reshape(-1, 2).T
    n = len(names)
    graph = coo_matrix((np.ones(len(rows), bool), (rows, n + columns)), (n + len(number), n + len(number)))
    found = np.unique(connected_components(graph, directed=False)[1][:n], return_inverse=True)[1].astype(np.int64)
    return None if found.max(initial=-1) + 1 == n else found


def mean_error(values: np.ndarray, strata: np.ndarray, clusters: np.ndarray) -> float:
    """Return the standard error of the unweighted mean over strata of values (n,); infinite for one cluster.

    Args:
        values: a number per answer.
        strata: (n,), the kind of each answer; equal ones for a plain mean.
        clusters: (n,) int64.
    """
    kinds, place, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    means = np.bincount(place, weights=values) / sizes
    influence = (values - means[place]) / (len(kinds) * sizes[place])
    sums = np.bincount(clusters, weights=influence)[np.unique(clusters)]
    return math.inf if len(sums) < 2 else math.sqrt(len(sums) / (len(sums) - 1) * float(sums @ sums))


def share_interval(right: np.ndarray, strata: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Return a 95 % interval of the unweighted mean over strata of right answers (n,); other arguments as in `mean_error`."""
    _, place, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    share, error = float((np.bincount(place, weights=right) / sizes).mean()), mean_error(right, strata, clusters)
    independent = len(np.unique(clusters))
    # Without variation nothing shows how alike the answers of a cluster are; then a cluster counts as one.
    if share in (0.0, 1.0) or math.isinf(error):
        return wilson(share, independent)
    return wilson(share, min(len(right), share * (1 - share) / error**2) if error else len(right))


def difference_test(change: np.ndarray, strata: np.ndarray, clusters: np.ndarray) -> tuple[tuple[float, float], float]:
    """Return the 95 % interval and the two-sided p of the unweighted mean over strata of differences (n,), by a normal distribution."""
    _, place, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    value, error = float((np.bincount(place, weights=change) / sizes).mean()), mean_error(change, strata, clusters)
    if math.isinf(error):
        return (-1.0, 1.0), 1.0
    # Without variation, every cluster changed by the same amount: the sign test of the clusters.
    p = float(2 * ndtr(-abs(value) / error)) if error else min(1.0, 2 * 0.5 ** len(np.unique(clusters)))
    return (value - Z * error, value + Z * error), p if value else 1.0
