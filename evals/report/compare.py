"""Two checkpoints on the same samples: McNemar's test, and a paired bootstrap of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from sparo_train.core.errors import DataError

from ..tasks.clusters import difference_test
from ..tasks.result import DRAWS, LOWER_IS_BETTER, bootstrap, percentiles, sum_groups
from ..tasks.zeroshot import macro_f1, worst_group_accuracy
from .results_file import Record, load_predictions

# Options that must be equal for two scores of one name to be comparable; older results may lack those of the second
# row.
_MUST_MATCH = (
    "drawn",
    "numbers",
    "mask_size",
    "resampling",
    "background",
    "ignore",
    "first_frame",
    "shown",
    "far",
    "balanced",
    "left_out_neighbours",
)
_MATCH_IF_PRESENT = (
    "facts",
    "templates",
    "prompts",
    "temperature",
    "normalize",
    "trained_on",
    "resize",
    "average",
    "head",
    "fewshot_k",
    "ties",
    "exclude_kinds",
    "min_per_kind",
    "held_out",
    "lr",
    "epochs",
    "batch_size",
    "repeats",
    "selected_by",
    "border_crop",
)


# Metrics of classification that are not a mean over samples.
_NOT_A_MEAN = ("f1_macro", "acc1_worst_group", "acc5_worst_group")


class Comparison(NamedTuple):
    """Difference of the headline, second minus first.

    Attributes:
        only_first, only_second: number of samples that only one of them has right.
        stratified: the difference is a mean over kinds or classes, which `p` is not about.
        p: exact two-sided McNemar; for samples in clusters (questions about one image, images of one patient), of a normal
            distribution whose standard error is that of sums over clusters. For scores that are not right or wrong, p is None, and the two count samples with a
            better score (for retrieval: images whose texts are found).
    """

    task: str
    headline: str
    difference: float
    interval: tuple[float, float]
    only_first: int
    only_second: int
    p: float | None
    n: int
    stratified: bool = False


def compare(first: Record, second: Record, metric: str | None = None) -> Comparison:
    """Compare two records of one task by a metric, by default the headline.

    The interval resamples the samples that both have: pairs within their kind if the headline is macro, images with
    their captions for retrieval, and images if each has its own value (FG-ARI, PSNR). Samples in clusters are not
    resampled one by one.

    Raises:
        DataError: other data, other options, or predictions that were not stored.
    """
    if first.result.task != second.result.task:
        raise DataError(
            f"{first.task}: {first.checkpoint} was scored by {first.result.task}, but {second.checkpoint} by {second.result.task}"
        )
    metric = metric or first.result.headline
    if first.dataset != second.dataset or (metric == first.result.headline) != (metric == second.result.headline):
        raise DataError(
            f"{first.task}: {first.checkpoint} and {second.checkpoint} were scored on different data or with "
            f"different headline metrics, got {first.result.headline} on data {first.dataset[:12]} and "
            f"{second.result.headline} on data {second.dataset[:12]}"
        )
    _refuse_other_kind(first, second)
    a, b = load_predictions(first), load_predictions(second)
    # Paired statistics of samples that do not correspond would still be numbers.
    if not np.array_equal(a["keys"], b["keys"]):
        raise DataError(f"{first.task}: the samples of {first.checkpoint} and {second.checkpoint} have different keys")
    if "label" in a and not np.array_equal(a["label"], b["label"]):
        raise DataError(
            f"{first.task}: the labels of {first.checkpoint} and {second.checkpoint} differ, so one was scored on other annotations"
        )
    if first.result.task == "retrieval":
        return _retrieval(first, second, a, b, metric)
    if metric in _NOT_A_MEAN and all({"label", "predicted"} <= arrays.keys() for arrays in (a, b)):
        return _compare_classification(first, second, a, b, metric)
    if "right" not in a and metric in a:
        return _compare_per_sample(first, second, a, b, metric)
    name, rows, strata = _answers(first, a, metric)
    for record, arrays in ((first, a), (second, b)):
        _refuse_other_metric(record, arrays[name][rows], strata, metric)
    change = (b[name].astype(np.int64) - a[name].astype(np.int64))[rows]
    worse, better = int((change < 0).sum()), int((change > 0).sum())
    names = np.unique(strata)
    value, stratified = float(np.mean([change[strata == kind].mean() for kind in names])), len(names) > 1
    if (clusters := _clusters(a, b)) is not None:
        interval, p = difference_test(change, strata, clusters[rows])
        return Comparison(first.task, metric, value, interval, worse, better, p, len(change), stratified)
    rng, draws = np.random.default_rng(0), []
    # Kind by kind, so that in a resampled mean every kind keeps its size.
    for name in names:
        here = change[strata == name]
        # A pair has three possible outcomes, so multinomial counts are equivalent to resampling n pairs.
        shares = np.asarray([(here == v).mean() for v in (-1, 0, 1)])
        counts = rng.multinomial(len(here), shares / shares.sum(), DRAWS)
        draws.append((counts[:, 2] - counts[:, 0]) / len(here))
    # Samples that both have right, or both wrong, do not show which is better.
    p = binomtest(better, better + worse).pvalue if better + worse else 1.0
    interval = percentiles(np.mean(draws, axis=0))
    return Comparison(first.task, metric, value, interval, worse, better, float(p), len(change), stratified)


def _clusters(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return the cluster of each sample; None if samples are independent. Older results may lack it."""
    return a.get("cluster", b.get("cluster"))


def _answers(record: Record, arrays: dict[str, np.ndarray], metric: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the array with a metric's right answers, the rows that it is about, and the kind or class of each of them.

    Raises:
        DataError: the metric does not count right answers of samples.
    """
    base, _, kind = metric.partition("/")
    kinds = arrays.get("kind", np.zeros(0))
    if base in kinds and base not in arrays and base != record.result.headline:  # pairs have a metric per kind
        base, kind = "right", base
    name = base if base in arrays and arrays[base].dtype == bool else "right"
    headline = record.result.headline
    known = name != "right" or base in ("right", "macro", "micro", headline)
    if name not in arrays or not known or metric in ("order_only", "blind"):
        raise DataError(
            f"{record.task}: {metric} does not count each sample as right or wrong, so samples of two checkpoints cannot be paired. "
            "Compare the intervals that `sparo eval table` shows."
        )
    rows = kinds == kind if kind else np.ones(len(arrays[name]), bool)
    if not kind and (metric == "macro" or (record.result.options.get("average") == "macro" and metric != "micro")):
        return name, rows, kinds
    strata = arrays["label"] if metric == "mean_per_class_recall" else np.zeros(len(rows), np.int64)
    return name, rows, strata[rows]


def _refuse_other_metric(record: Record, right: np.ndarray, strata: np.ndarray, metric: str) -> None:
    """Raise `DataError` if right answers do not give the metric's value: the difference would be that of another metric."""
    mean = float(np.mean([right[strata == kind].mean() for kind in np.unique(strata)]))
    if abs(mean - record.result.metrics.get(metric, mean)) > 1e-5:
        raise DataError(
            f"{record.task}: {metric} is not a mean over samples, so samples of two checkpoints cannot be paired. Compare the "
            "intervals that `sparo eval table` shows."
        )


def _refuse_other_kind(first: Record, second: Record) -> None:
    """Raise `DataError` if two scores of one name were computed with different options."""
    for key in different_options(first, second):
        one, other = first.result.options.get(key), second.result.options.get(key)
        raise DataError(
            f"{first.task}: {first.checkpoint} was scored with {key}={one}, but {second.checkpoint} with "
            f"{key}={other}, so their {first.result.headline} cannot be paired"
        )


def different_options(first: Record, second: Record) -> list[str]:
    """Return the options in which two scores of one task differ, so that they cannot be compared."""
    mine, theirs = first.result.options, second.result.options
    keys = (*_MUST_MATCH, *(key for key in _MATCH_IF_PRESENT if key in mine and key in theirs))
    return [key for key in keys if mine.get(key) != theirs.get(key)]


def _compare_per_sample(
    first: Record, second: Record, a: dict[str, np.ndarray], b: dict[str, np.ndarray], metric: str
) -> Comparison:
    """Compare values per sample under the same resampling; samples without a value on either side are excluded."""
    x, y = (arrays[metric].astype(np.float64) for arrays in (a, b))
    there = ~(np.isnan(x) | np.isnan(y))
    if not there.any():
        raise DataError(f"{first.task}: no sample has {metric} for both checkpoints. Compare another metric.")
    change, clusters = (y - x)[there], _clusters(a, b)
    groups = None if clusters is None else clusters[there].tolist()
    draws = bootstrap(sum_groups(change[:, None], groups), sum_groups(np.ones((len(change), 1)), groups))[:, 0]
    gain = -change if metric in LOWER_IS_BETTER else change
    return Comparison(
        first.task,
        metric,
        float(change.mean()),
        percentiles(draws),
        int((gain < 0).sum()),
        int((gain > 0).sum()),
        None,
        len(change),
    )


def _compare_classification(
    first: Record, second: Record, a: dict[str, np.ndarray], b: dict[str, np.ndarray], metric: str
) -> Comparison:
    """Compare a metric that is not a mean over samples, computed for both on the same resampled samples."""
    labels = a["label"]
    if metric == "f1_macro":
        columns = [labels, a["predicted"][:, 0], b["predicted"][:, 0]]
        right = [labels == predicted for predicted in columns[1:]]
    else:
        if "group" not in a or "group" not in b or not np.array_equal(a["group"], b["group"]):
            raise DataError(
                f"{first.task}: the groups of {first.checkpoint} and {second.checkpoint} differ. Score both again."
            )
        best = 5 if metric.startswith("acc5") else 1
        right = [(arrays["predicted"][:, :best] == labels[:, None]).any(axis=1) for arrays in (a, b)]
        columns = [np.unique(a["group"], return_inverse=True)[1], *right]
    # Samples with equal values are drawn together.
    (shared, one, other), counts = _unique_columns(columns)

    def difference(weights: np.ndarray) -> float:
        if metric == "f1_macro":
            return macro_f1(shared, other, weights) - macro_f1(shared, one, weights)
        return worst_group_accuracy(other, shared, weights) - worst_group_accuracy(one, shared, weights)

    rng, n = np.random.default_rng(0), len(labels)
    draws = np.asarray([difference(rng.multinomial(n, counts / n)) for _ in range(DRAWS)])
    only_first, only_second = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    return Comparison(first.task, metric, difference(counts), percentiles(draws), only_first, only_second, None, n)


def _unique_columns(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of columns (n,), as columns, and how often each occurs."""
    rows, counts = np.unique(np.stack(columns, axis=1).astype(np.int64), axis=0, return_counts=True)
    return rows.T, counts


def _retrieval(
    first: Record, second: Record, a: dict[str, np.ndarray], b: dict[str, np.ndarray], headline: str
) -> Comparison:
    """Compare both directions under the same resampled images."""
    names = (
        [headline.replace("mean", kind) for kind in ("text", "image")] if headline.startswith("mean") else [headline]
    )
    # Rows are images; a mean of both directions needs the same images for both. Columns depend on the task's k.
    columns = [arrays["columns"].tolist() for arrays in (a, b)]
    if any(name not in known for known in columns for name in names):
        raise DataError(f"{first.task}: {headline} has no values per image. Compare another metric.")
    at = [[known.index(name) for name in names] for known in columns]
    sums, counts = (np.concatenate([a[key][:, at[0]], b[key][:, at[1]]], axis=1) for key in ("sums", "counts"))
    draws = bootstrap(sums, counts)
    change = sums[:, len(names)] - sums[:, 0]
    difference = draws[:, len(names) :].mean(axis=1) - draws[:, : len(names)].mean(axis=1)
    return Comparison(
        first.task,
        headline,
        second.result.metrics[headline] - first.result.metrics[headline],
        percentiles(difference),
        int((change < 0).sum()),
        int((change > 0).sum()),
        None,
        first.result.n,
    )
