"""Scores of masks against objects: ARI and FG-ARI, Hungarian mIoU, mBO. All from counts of pixels, in fp64.

One name stands for different definitions in different code bases. Here each definition has its own name, and results
record the size of masks, the background label, and the score of images without foreground.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..result import Result, bootstrap, percentiles

HEADLINE = "fg_ari"
_SMALL = 512  # labels that are counted without a sort


class Counts(NamedTuple):
    """Pixels by true and predicted label of one image: table (Kt, Kp) int64; `background`: the row that is not an object, or None."""

    table: np.ndarray
    background: int | None

    @property
    def objects(self) -> np.ndarray:
        """Return (Ko, Kp): the rows of objects that occur."""
        rows = self.table if self.background is None else np.delete(self.table, self.background, axis=0)
        return rows[rows.sum(1) > 0]


class Masked(NamedTuple):
    """Label maps of an image, of one shape; classes: class of every pixel, if known."""

    true: np.ndarray
    predicted: np.ndarray
    classes: np.ndarray | None = None


def count_pixels(
    true: np.ndarray, predicted: np.ndarray, background: int | None = 0, ignore: int | None = None
) -> Counts:
    """Count pixels of label maps of equal shape, with any number of dimensions (a clip's masks are one map), of integers from 0.

    Args:
        true, predicted, background: label maps, and the label that is not an object.
        ignore: true label of pixels that are not counted.

    Raises:
        ValueError: other shapes, or negative labels.
    """
    if true.shape != predicted.shape:
        raise ValueError(f"masks of {predicted.shape} and {true.shape} differ in size. Resize them first.")
    if true.size and (true.min() < 0 or predicted.min() < 0):
        raise ValueError("a label is below 0")
    if ignore is not None:
        there = true != ignore
        true, predicted = true[there], predicted[there]
    names, rows, many = _number_labels(true)
    _, columns, most = _number_labels(predicted)
    # One pass over pixels: a pair of labels is one integer.
    whole = np.bincount(rows * most + columns, minlength=many * most).reshape(many, most)
    used_rows, of = whole.sum(1) > 0, whole.sum(0) > 0
    names, table = names[used_rows], whole[used_rows][:, of]
    at = np.flatnonzero(names == background) if background is not None else []
    return Counts(table, int(at[0]) if len(at) else None)


def _number_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return labels (possibly unused ones), each pixel's index among them, and their number."""
    flat = labels.reshape(-1)
    if not flat.size or flat.max() < _SMALL:  # unchanged, because removing gaps would need a sort
        many = int(flat.max(initial=0)) + 1
        return np.arange(many), flat.astype(np.int64), many
    names, places = np.unique(flat, return_inverse=True)
    return names, places.reshape(-1), len(names)


def adjusted_rand(table: np.ndarray) -> float:
    """Return Hubert and Arabie's adjusted Rand index of a contingency table; 1 if both sides are one cluster or all singletons; NaN for an empty table."""
    n = float(table.sum())
    if n == 0:
        return float("nan")
    if n == 1:
        return 1.0
    # As shares of all pairs, because products of counts exceed int64 for clips, and fp32 much earlier.
    pairs = n * (n - 1)
    together, rows, columns = (
        float((counts * (counts - 1.0)).sum()) / pairs
        for counts in (table.astype(float), table.sum(1).astype(float), table.sum(0).astype(float))
    )
    expected, most = rows * columns, (rows + columns) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def overlaps(counts: Counts) -> np.ndarray:
    """Return (Ko, Kp) intersection over union of every object with every predicted mask over its whole area."""
    rows = counts.objects.astype(float)
    union = rows.sum(1)[:, None] + counts.table.sum(0).astype(float)[None] - rows
    return rows / np.maximum(union, 1)


def matched_iou(iou: np.ndarray) -> float:
    """Return the mean IoU of objects under the best one-to-one matching; an object without a mask counts as 0. NaN without objects."""
    if not len(iou):
        return float("nan")
    rows, columns = linear_sum_assignment(-iou)
    return float(iou[rows, columns].sum() / len(iou))


def best_overlap(iou: np.ndarray) -> float:
    """Return the mean over objects of the best IoU; a mask may be the best for several. NaN without objects."""
    return float(iou.max(1).mean()) if len(iou) else float("nan")


def image_scores(
    true: np.ndarray,
    predicted: np.ndarray,
    background: int | None = 0,
    ignore: int | None = None,
    classes: np.ndarray | None = None,
) -> dict[str, float]:
    """Return one image's scores, or one clip's; NaN without objects.

    `ari`: over all pixels. `fg_ari`: over those whose true label is not background; predictions keep all their masks.
    `fg_ari_savi`: the same, with 1 without foreground (SAVi, OCLF, OSRT, MESH); `fg_ari_videosaur`: also with 1,
    unless every pixel is ignored. `miou`: Hungarian, over objects (videosaur's `hungarian`). `mbo_i` (its `overlap`):
    mean best overlap of instances; `mbo_c`: of classes, with their instances merged. `slots_used`: number of predicted
    masks with a pixel.
    """
    counts = count_pixels(true, predicted, background, ignore)
    of_classes = float("nan")
    if classes is not None:
        there = slice(None) if ignore is None else (true != ignore) & (classes != ignore)
        # The background of the instances is also that of the classes, whose own number 0 may be a class.
        classes = classes.astype(np.int64) + 1
        if background is not None:
            classes[true == background] = 0
        of_classes = best_overlap(
            overlaps(count_pixels(classes[there], predicted[there], None if background is None else 0))
        )
    foreground, iou = adjusted_rand(counts.objects), overlaps(counts)
    return {
        "ari": adjusted_rand(counts.table),
        "fg_ari": foreground,
        "fg_ari_savi": 1.0 if np.isnan(foreground) else foreground,
        "fg_ari_videosaur": 1.0 if np.isnan(foreground) and counts.table.sum() else foreground,
        "miou": matched_iou(iou),
        "mbo_i": best_overlap(iou),
        "mbo_c": of_classes,
        "slots_used": float(counts.table.shape[1]),
    }


def coverage(predicted: np.ndarray, slots: int) -> np.ndarray:
    """Return each slot's share of an image's pixels, (slots,)."""
    return np.bincount(predicted.reshape(-1), minlength=slots)[:slots] / max(predicted.size, 1)


def score(
    masks: Iterable[Masked], background: int | None = 0, ignore: int | None = None, slots: int | None = None
) -> Result:
    """Return means over images of `image_scores`. Images without an object are excluded from scores that need one, and counted as `empty`.

    Metrics that no image has are omitted. Intervals resample images. `slots_used` is among the predictions, per image.

    Args:
        masks: per image true and predicted label maps of one size.
        background: label that is not an object.
        ignore: see `count_pixels`.
        slots: number of the model's slots. Their shares of each image are then among the predictions (`coverage`), and
            the number of images in which each has a pixel among the counts.
    """
    scores, covered = [], []
    for m in masks:
        scores.append(image_scores(m.true, m.predicted, background, ignore, m.classes))
        covered.append(coverage(m.predicted, slots or 0))
    shared = np.asarray(covered, np.float32).reshape(len(scores), slots or 0)
    # Metrics are shares, which a number of slots is not.
    means = metric_means(scores, without=("slots_used",))
    empty = int(np.isnan(means.columns[HEADLINE]).sum()) if scores else 0
    return Result(
        "masks",
        len(scores) - empty,
        HEADLINE,
        means.metrics,
        0.0,
        means.intervals,
        {
            "background": background,
            "ignore": ignore,
            "empty": "excluded; fg_ari_savi, fg_ari_videosaur: 1",
            "mean": "over images",
            "interval": "bootstrap over images",
        },
        {
            "images": len(scores),
            "empty": empty,
            **{f"images_of_slot_{k}": int((shared[:, k] > 0).sum()) for k in range(slots or 0)},
        },
        {
            **{name: column.astype(np.float32) for name, column in means.columns.items()},
            **({"coverage": shared} if slots else {}),
        },
    )


class Means(NamedTuple):
    """Columns (n,) of each metric, NaN if a sample has none; metrics, intervals: of those that any sample has."""

    columns: dict[str, np.ndarray]
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def metric_means(rows: Sequence[Mapping[str, float]], without: Sequence[str] = ()) -> Means:
    """Return means of metrics over the samples that have them, and intervals that resample samples.

    Args:
        rows: metrics per sample.
        without: columns that are not metrics.
    """
    names = list(rows[0]) if rows else []
    table = np.array([[row[name] for name in names] for row in rows]).reshape(len(rows), len(names))
    there = ~np.isnan(table)
    sums, counts = np.where(there, table, 0.0), there.sum(0)
    # A metric that no sample has is missing, not zero.
    shares = {name: i for i, name in enumerate(names) if name not in without and counts[i]}
    draws = bootstrap(sums, there.astype(float)) if rows else np.zeros((1, 0))
    return Means(
        {name: table[:, i] for i, name in enumerate(names)},
        {name: float(sums[:, i].sum() / counts[i]) for name, i in shares.items()},
        {name: percentiles(draws[:, i]) for name, i in shares.items()},
    )
