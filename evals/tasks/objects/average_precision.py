"""Average precision of predicted sets of objects, over all images together (Locatello et al. 2020, Appendix; Zhang et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..result import Result, percentiles

THRESHOLDS = (float("inf"), 1.0, 0.5, 0.25, 0.125, 0.0625)
HEADLINE = "ap_0.5"
Match = Literal["nearest", "dspn"]
_DRAWS = 500  # each is a pass over all predictions


class Pooled(NamedTuple):
    """Predictions of all images, the most confident first.

    Attributes:
        image: image of each prediction.
        target: nearest object among those with the same attributes, or -1.
        distance: distance to it.
        total: number of objects.
    """

    image: np.ndarray
    target: np.ndarray
    distance: np.ndarray
    total: int


def pooled(
    predicted: Sequence[np.ndarray], true: Sequence[np.ndarray], attributes: Mapping[str, slice], unit: float
) -> Pooled:
    """Rank predictions by their last column; ties rank in reverse order of images and slots, as in the reference.

    Args:
        predicted: per image (P, W): position (3), attributes, confidence.
        true: per image (n, W), existing objects.
        attributes: columns of each; they agree if their largest entries do.
        unit: size of one unit of position in the world.
    """
    image, target, distance, confidence = [], [], [], []
    before = 0
    for number, (prediction, objects) in enumerate(zip(predicted, true, strict=True)):
        far = _distances(prediction, objects, attributes, unit)
        nearest = far.argmin(1) if len(objects) else np.zeros(len(prediction), np.int64)
        away = far[np.arange(len(prediction)), nearest] if len(objects) else np.full(len(prediction), np.inf)
        image.append(np.full(len(prediction), number))
        target.append(np.where(np.isfinite(away), nearest + before, -1))
        distance.append(away)
        confidence.append(prediction[:, -1].astype(np.float64))
        before += len(objects)
    order = _ranking(np.concatenate(confidence))
    images, targets, distances = (np.concatenate(part)[order] for part in (image, target, distance))
    return Pooled(images, targets, distances, before)


def _distances(prediction: np.ndarray, objects: np.ndarray, attributes: Mapping[str, slice], unit: float) -> np.ndarray:
    """Return (P, n) distances, infinite if an attribute differs."""
    alike = np.ones((len(prediction), len(objects)), bool)
    for columns in attributes.values():
        # Compare largest entries, because predictions are distributions and targets one-hot.
        alike &= prediction[:, None, columns].argmax(-1) == objects[None, :, columns].argmax(-1)
    between = (prediction[:, None, :3].astype(np.float64) - objects[None, :, :3]) * unit
    return np.where(alike, np.sqrt((between**2).sum(-1)), np.inf)


def hits(ranked: Pooled, threshold: float) -> np.ndarray:
    """Return (P,) bool: the first prediction whose nearest object is this one and near enough; later ones for the same object are false."""
    near = (ranked.target >= 0) & (ranked.distance < threshold)
    at = np.flatnonzero(near)
    # Only the first for each object: `unique` returns the first occurrence.
    _, first = np.unique(ranked.target[at], return_index=True)
    is_hit = np.zeros(len(near), bool)
    is_hit[at[first]] = True
    return is_hit


def hits_dspn(
    predicted: Sequence[np.ndarray],
    true: Sequence[np.ndarray],
    attributes: Mapping[str, slice],
    unit: float,
    threshold: float,
) -> np.ndarray:
    """Return hits as `hits`, but an object that is taken does not block later predictions (iDSPN's rule); in `pooled`'s order."""
    flags, confidence = [], []
    for prediction, objects in zip(predicted, true, strict=True):
        far = _distances(prediction, objects, attributes, unit)
        hit = np.zeros(len(prediction), bool)
        for row in _ranking(prediction[:, -1].astype(np.float64)):
            if len(objects) and far[row].min() < threshold:
                hit[row] = True
                # Remove its column, so that no other prediction matches it.
                far[:, far[row].argmin()] = np.inf
        flags.append(hit)
        confidence.append(prediction[:, -1].astype(np.float64))
    return np.concatenate(flags)[_ranking(np.concatenate(confidence))]


def _ranking(confidence: np.ndarray) -> np.ndarray:
    """Return indices from the most to the least confident prediction.

    google-research/slot_attention reverses an ascending sort, so ties are visited last to first. The sort is stable
    here, so that the order is the same on every machine.
    """
    return np.argsort(confidence, kind="stable")[::-1]


def area(hit: np.ndarray, total: float, weights: np.ndarray | None = None) -> float:
    """Return the area under the envelope of precision over recall, at all points; `weights` are multiplicities of predictions. NaN without objects."""
    if total <= 0:
        return float("nan")
    weights = np.ones(len(hit)) if weights is None else weights
    true, predicted_count = np.cumsum(hit * weights), np.cumsum(weights)
    precision = np.divide(true, predicted_count, out=np.zeros(len(hit)), where=predicted_count > 0)
    # Envelope from the end: precision at a recall is the maximum over larger recalls.
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    recall = np.concatenate([[0.0], true]) / total
    return float((np.diff(recall) * envelope).sum())


def score(
    predicted: Sequence[np.ndarray],
    true: Sequence[np.ndarray],
    attributes: Mapping[str, slice],
    unit: float,
    match: Match = "nearest",
) -> Result:
    """Compute AP at every threshold, `ap_inf` … `ap_0.0625`; arguments as in `pooled`.

    Intervals resample images (500 draws). Every prediction counts, even those with low confidence.
    """
    ranked = pooled(predicted, true, attributes, unit)
    # Resample images, because objects of one image are not independent.
    of_image = np.array([len(rows) for rows in true], np.float64)
    resamples = np.random.default_rng(0).multinomial(len(true), np.full(len(true), 1 / len(true)), _DRAWS)
    metrics, intervals = {}, {}
    for threshold in THRESHOLDS:
        hit = hits(ranked, threshold) if match == "nearest" else hits_dspn(predicted, true, attributes, unit, threshold)
        name = f"ap_{threshold:g}"
        metrics[name] = area(hit, ranked.total)
        draws = [area(hit, float(times @ of_image), times[ranked.image]) for times in resamples]
        intervals[name] = percentiles(np.array(draws)[~np.isnan(draws)])
    options = {"match": match, "mean": "all images pooled", "interval": "bootstrap over images"}
    counts = {"objects": ranked.total, "predictions": len(ranked.image), "empty": int((of_image == 0).sum())}
    return Result("objects", len(true), HEADLINE, metrics, 0.0, intervals, options, counts)
