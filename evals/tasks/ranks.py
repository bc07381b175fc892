"""Measures of encodings that need no labels: the effective rank (RankMe), and the rank of what views of an image share (LiDAR)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import linalg

from .result import Result

_EPSILON = 1e-7
_FOLDS = 10


def effective_rank(values: np.ndarray) -> float:
    """Return exp of the entropy of the shares of non-negative values (Garrido et al. 2023, Eq. 1)."""
    shares = np.clip(values, 0, None)
    shares = shares / max(shares.sum(), 1e-300) + _EPSILON
    return float(np.exp(-(shares * np.log(shares)).sum()))


def rankme(encodings: np.ndarray) -> float:
    """Return the effective rank of encodings (n, D), by their singular values."""
    return effective_rank(np.linalg.svd(encodings.astype(np.float64), compute_uv=False))


def lidar(views: np.ndarray, delta: float = 1e-4) -> float:
    """Return LiDAR (Thilak et al. 2024, Eq. 2 to 4): the effective rank of the variance between images, relative to that within images.

    Args:
        views: encodings (n, q, D) of q views of each of n images.
        delta: added to the variance within images.
    """
    views = views.astype(np.float64)
    means = views.mean(axis=1)
    between = means - means.mean(axis=0)
    within = (views - means[:, None]).reshape(-1, views.shape[-1])
    covariance = within.T @ within / len(within) + delta * np.eye(views.shape[-1])
    return effective_rank(linalg.eigh(between.T @ between / len(between), covariance, eigvals_only=True))


def score(views: np.ndarray) -> Result:
    """Return LiDAR and RankMe of encodings (n, q, D), with jackknife intervals over ten parts of the images.

    RankMe is that of the first view of every image.
    """
    n, _, width = views.shape
    measures: dict[str, Callable[[np.ndarray], float]] = {"lidar": lidar, "rankme": lambda part: rankme(part[:, 0])}
    metrics, intervals = {}, {}
    for name, measure in measures.items():
        metrics[name] = measure(views)
        intervals[name] = _jackknife(views, measure, metrics[name])
    counts = {"views": views.shape[1], "largest_rank": min(n, width)}
    return Result("rank", n, "lidar", metrics, 1.0, intervals, {"delta": 1e-4}, counts)


def _jackknife(views: np.ndarray, measure: Callable[[np.ndarray], float], value: float) -> tuple[float, float]:
    folds = min(_FOLDS, len(views))
    if folds < 2 or len(views) < 4:
        return value, value
    parts = np.arange(len(views)) % folds
    without = np.array([measure(views[parts != fold]) for fold in range(folds)])
    half = 1.959964 * float(np.sqrt((folds - 1) / folds * ((without - without.mean()) ** 2).sum()))
    return value - half, value + half
