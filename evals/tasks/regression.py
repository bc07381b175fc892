"""Ridge regression of a number per image on its encoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from sparo_train.core.errors import DataError

from .result import Result, bootstrap, percentiles, sum_groups

ALPHAS = np.logspace(-3, 5, 17)
_FOLDS = 5


def score(
    train: np.ndarray,
    targets: np.ndarray,
    test: np.ndarray,
    truth: np.ndarray,
    groups: Sequence[str] | None = None,
    test_groups: Sequence[str] | None = None,
) -> Result:
    """Fit on `train` (n, D) with numbers (n,), and score on `test` (m, D) with numbers (m,).

    The strength is that of `ALPHAS` with the smallest squared error in cross-validation: leave-one-out, or five folds
    that do not divide a group of `groups`.

    Returns:
        r2 (against the mean of the test set), mae, rmse and Spearman's rank correlation, with 95 % intervals that
        resample test images, or `test_groups`; `options` has the mae of always naming the median of the training set.

    Raises:
        DataError: fewer than two different numbers in one of the sets.
    """
    # scikit-learn imports in a second, which other tasks do not need
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import GroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    for name, values in (("train", targets), ("test", truth)):
        if len(np.unique(values)) < 2:
            raise DataError(
                f"{name}: needs at least two different numbers for a regression, got {len(np.unique(values))}"
            )
    folds, units = None, set(groups or ())
    if groups is not None and len(units) > 1:
        folds = GroupKFold(min(_FOLDS, len(units))).split(train, groups=list(groups))
    # With folds, scikit-learn would compare R2, which says nothing if all images of a fold have the same number.
    ridge = RidgeCV(ALPHAS) if folds is None else RidgeCV(ALPHAS, cv=list(folds), scoring="neg_mean_squared_error")
    model = make_pipeline(StandardScaler(), ridge)
    predicted = model.fit(train.astype(np.float64), targets).predict(test.astype(np.float64))
    errors, n = predicted - truth, len(truth)
    one = np.ones(n)
    # Sums per image, so that a resampled set has its own mean.
    sums = np.stack([errors**2, np.abs(errors), truth, truth**2], axis=1)
    draws = bootstrap(sum_groups(sums, test_groups), sum_groups(np.stack([one] * 4, axis=1), test_groups))
    squared, absolute, mean, square = draws.T
    # A draw of one patient, whose images have the same number, has no R2.
    variance = square - mean**2
    varied = variance > 1e-9 * truth.var()
    rank = float(stats.spearmanr(predicted, truth)[0])  # pyright: ignore[reportArgumentType]
    metrics = {
        "r2": float(1 - (errors**2).mean() / truth.var()),
        "mae": float(np.abs(errors).mean()),
        "rmse": float((errors**2).mean() ** 0.5),
        "spearman": 0.0 if np.isnan(rank) else rank,  # a constant prediction has none
    }
    intervals = {
        "r2": percentiles(1 - squared[varied] / variance[varied]),
        "mae": percentiles(absolute),
        "rmse": percentiles(squared**0.5),
    }
    options = {
        "alpha": ridge.alpha_,
        "selected_by": "leave-one-out" if folds is None else "folds of groups",
        "mae_of_median": float(np.abs(np.median(targets) - truth).mean()),
    }
    counts = {"groups": len(set(test_groups))} if test_groups else {}
    predictions = {"mae": np.abs(errors), "predicted": predicted}
    return Result("regression", n, "r2", metrics, 0.0, intervals, options, counts, predictions)
