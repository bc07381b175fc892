"""How well masks follow objects: ARI and FG-ARI, Hungarian mIoU, mBO. All from counts of pixels, in fp64.

The same name means different numbers in different code bases; here each definition has a name of its own, and every result says which
size masks had, what counts as background, and what an image without foreground gives.
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
    """Pixels by true and predicted label of one image: table (Kt, Kp) int64; `background`: the row that is no object, or None."""

    table: np.ndarray
    background: int | None

    @property
    def objects(self) -> np.ndarray:
        """(Ko, Kp): the rows of objects that occur."""
        rows = self.table if self.background is None else np.delete(self.table, self.background, axis=0)
        return rows[rows.sum(1) > 0]


class Masked(NamedTuple):
    """An image's label maps, of one shape.  classes: the class of every pixel, where classes are known."""

    true: np.ndarray
    predicted: np.ndarray
    classes: np.ndarray | None = None


def count_pixels(
    true: np.ndarray, predicted: np.ndarray, background: int | None = 0, ignore: int | None = None
) -> Counts:
    """Label maps of equal shape, any number of dimensions (a clip's masks are one map), of whole numbers from 0.

    Args:
        ignore: the true label of pixels that are counted nowhere.

    Raises:
        ValueError: other shapes, or negative labels.
    """
    if true.shape != predicted.shape:
        raise ValueError(f"masks of {true.shape} against {predicted.shape}; bring them to one size first")
    if true.size and (true.min() < 0 or predicted.min() < 0):
        raise ValueError("a label is below 0")
    if ignore is not None:
        there = true != ignore
        true, predicted = true[there], predicted[there]
    names, rows, many = _numbered(true)
    _, columns, most = _numbered(predicted)
    # One pass over pixels: a pair of labels is one number.
    whole = np.bincount(rows * most + columns, minlength=many * most).reshape(many, most)
    used_rows, of = whole.sum(1) > 0, whole.sum(0) > 0
    names, table = names[used_rows], whole[used_rows][:, of]
    at = np.flatnonzero(names == background) if background is not None else []
    return Counts(table, int(at[0]) if len(at) else None)


def _numbered(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Labels in use (some of them perhaps by nobody), each pixel's place among them, and how many they are."""
    flat = labels.reshape(-1)
    if not flat.size or flat.max() < _SMALL:  # as they are: counting them off would need a sort
        many = int(flat.max(initial=0)) + 1
        return np.arange(many), flat.astype(np.int64), many
    names, places = np.unique(flat, return_inverse=True)
    return names, places.reshape(-1), len(names)


def adjusted_rand(table: np.ndarray) -> float:
    """Hubert and Arabie's adjusted Rand index of a contingency table; 1 where both sides are one cluster or all are alone; NaN of nothing."""
    n = float(table.sum())
    if n == 0:
        return float("nan")
    if n == 1:
        return 1.0
    # As shares of all pairs: products of counts would leave int64 for clips, and fp32 long before.
    pairs = n * (n - 1)
    together, rows, columns = (
        float((counts * (counts - 1.0)).sum()) / pairs
        for counts in (table.astype(float), table.sum(1).astype(float), table.sum(0).astype(float))
    )
    expected, most = rows * columns, (rows + columns) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def overlaps(counts: Counts) -> np.ndarray:
    """(Ko, Kp) intersection over union of every object with every predicted mask, its whole area included."""
    rows = counts.objects.astype(float)
    union = rows.sum(1)[:, None] + counts.table.sum(0).astype(float)[None] - rows
    return rows / np.maximum(union, 1)


def matched_iou(iou: np.ndarray) -> float:
    """The mean IoU of objects under the best one-to-one matching; an object without a mask counts as 0. NaN without objects."""
    if not len(iou):
        return float("nan")
    rows, columns = linear_sum_assignment(-iou)
    return float(iou[rows, columns].sum() / len(iou))


def best_overlap(iou: np.ndarray) -> float:
    """The mean over objects of the best IoU; a mask may be the best of several. NaN without objects."""
    return float(iou.max(1).mean()) if len(iou) else float("nan")


def image_scores(
    true: np.ndarray,
    predicted: np.ndarray,
    background: int | None = 0,
    ignore: int | None = None,
    classes: np.ndarray | None = None,
) -> dict[str, float]:
    """One image's scores, or one clip's; NaN where there is no object.

    `ari`: over all pixels.  `fg_ari`: over those whose true label is no background; predictions keep all their masks.
    `fg_ari_savi`: the same, with 1 where there is no foreground (SAVi, OCLF, OSRT, MESH); `fg_ari_videosaur`: with 1 there, too, unless
    every pixel is ignored.  `miou`: Hungarian, over objects (videosaur's `hungarian`).  `mbo_i` (its `overlap`): mean best overlap of
    instances; `mbo_c`: of classes, whose instances are one.  `slots_used`: predicted masks that hold a pixel.
    """
    counts = count_pixels(true, predicted, background, ignore)
    of_classes = float("nan")
    if classes is not None:
        there = slice(None) if ignore is None else (true != ignore) & (classes != ignore)
        of_classes = best_overlap(overlaps(count_pixels(classes[there], predicted[there], background)))
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
    """Each slot's share of an image's pixels, (slots,)."""
    return np.bincount(predicted.reshape(-1), minlength=slots)[:slots] / max(predicted.size, 1)


def score(
    masks: Iterable[Masked], background: int | None = 0, ignore: int | None = None, slots: int | None = None
) -> Result:
    """Means over images of `image_scores`; those without an object are left out of what needs one, and
    counted as `empty`. A metric that no image has is left out.

    Args:
        masks: per image true and predicted label maps of one size.  ignore: see `counted`.
        slots: that a model has. Their shares of each image are then among the predictions (`coverage`), and among the counts in how
            many images each holds a pixel.

    Intervals resample images. `slots_used` is among the predictions, per image.
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
            "empty": "left out; fg_ari_savi, fg_ari_videosaur: 1",
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
    """columns: (n,) of each metric, NaN where a sample has none.  metrics, intervals: of those that any sample has."""

    columns: dict[str, np.ndarray]
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def metric_means(rows: Sequence[Mapping[str, float]], without: Sequence[str] = ()) -> Means:
    """Means of samples' metrics over those that have them, and intervals that resample samples.

    Args:
        without: columns that are no metrics.
    """
    names = list(rows[0]) if rows else []
    table = np.array([[row[name] for name in names] for row in rows]).reshape(len(rows), len(names))
    there = ~np.isnan(table)
    sums, counts = np.where(there, table, 0.0), there.sum(0)
    # What no sample has is no score of zero.
    shares = {name: i for i, name in enumerate(names) if name not in without and counts[i]}
    draws = bootstrap(sums, there.astype(float)) if rows else np.zeros((1, 0))
    return Means(
        {name: table[:, i] for i, name in enumerate(names)},
        {name: float(sums[:, i].sum() / counts[i]) for name, i in shares.items()},
        {name: percentiles(draws[:, i]) for name, i in shares.items()},
    )
