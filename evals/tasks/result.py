"""Results: metrics with n, intervals, the chance level, the options that affect them, and predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

DRAWS = 2000
Z = 1.959964  # standard errors from an estimate to the end of its 95 % interval
# Metrics that are not shares: display factor, digits, and unit. All others are per cent.
_METRIC_FORMATS = {
    **{f"psnr{which}": (1, 2, " dB") for which in ("", "_held_out", "_shown", "_nearest", "_mean")},
    "mse": (1, 5, " mse"),
    "mse_sum": (1, 2, " mse_sum"),
    "loss": (1, 5, " loss"),
    "r2": (1, 3, " R2"),
    "mae": (1, 3, " MAE"),
    "rmse": (1, 3, " RMSE"),
    "spearman": (1, 3, " rho"),
    "lidar": (1, 1, ""),
    "rankme": (1, 1, ""),
}
LOWER_IS_BETTER = frozenset({"loss", "mse", "mse_sum", "depth_error", "mae", "rmse"})
_FEW_STEPS = 100  # a trained probe with fewer steps is reported
_BOOTSTRAP_BLOCK = 2**24  # values of a bootstrap that are stored at once


_FIELD_KINDS: dict[str, type | tuple[type, ...]] = {
    "task": str, "n": int, "headline": str, "metrics": dict, "chance": (int, float), "intervals": dict, "options": dict, "counts": dict,
    "data": str, "note": str,
}  # fmt: skip


class Result(NamedTuple):
    """A scored task.

    Attributes:
        metrics: fractions in 0..1 by name, except for those in `shown`.
        headline: the metric to show first.
        n: number of items.
        chance: its value for random guessing.
        intervals: 95 % by metric; if missing, the headline's is Wilson's.
        options: choices that papers leave open.
        counts: further numbers of samples.
        predictions: arrays with one row per sample.
        keys: names of the samples, in order.
        data: the set's identity (SHA-256).
        note: a peculiarity of the data; tables mark such a score.
    """

    task: str
    n: int
    headline: str
    metrics: dict[str, float]
    chance: float
    intervals: dict[str, tuple[float, float]] = {}  # noqa: RUF012  never written to
    options: dict[str, Any] = {}  # noqa: RUF012
    counts: dict[str, int] = {}  # noqa: RUF012
    predictions: dict[str, np.ndarray] = {}  # noqa: RUF012
    keys: tuple[str, ...] = ()
    data: str = ""
    note: str = ""

    @property
    def value(self) -> float:
        return self.metrics[self.headline]

    @property
    def interval(self) -> tuple[float, float]:
        return self.intervals.get(self.headline) or wilson(self.value, self.n)

    def with_headline(self, headline: str) -> Result:
        """Return the result with another of its metrics as headline, with the number of samples that have it."""
        column = self.predictions.get(headline)
        return self._replace(headline=headline, n=self.n if column is None else int((~np.isnan(column)).sum()))

    def remarks(self) -> list[str]:
        """Return warnings to show with the scores."""
        notes = [f"the data differ from the catalogue: {self.note}"] if self.note else []
        if skipped := self.left_out():
            notes.append(skipped)
        if count := self.counts.get("images_without_caption"):
            notes.append(f"{count} image(s) without a caption are not queries")
        if (count := self.counts.get("ties", 0)) > 0.01 * self.n and "questions" in self.options:
            counted = "right if the right choice is listed first" if self.options.get("ties") == "first" else "wrong"
            notes.append(
                f"{count} of {self.n} questions are decided by a tie, which counts as {counted}. The model may not distinguish their "
                "captions, for example because their end is cut"
            )
        if count := self.counts.get("captions_at_limit"):
            notes.append(
                f"{count} of {self.counts.get('texts', 0)} captions reach the largest number of tokens that the text tower reads; the rest "
                "of these captions may be ignored"
            )
        if count := self.counts.get("shared_captions"):
            notes.append(
                f"{count} of {self.counts.get('texts', 0)} captions also belong to another image. For such a caption, only one of these "
                "images counts as right, so even a perfect model cannot reach R@1 = 100"
            )
        if count := self.counts.get("scenes_beyond_rays"):
            notes.append(
                f"{count} of {self.n} scenes have something outside the distances that this model samples (near, far)"
            )
        if count := self.counts.get("skipped"):
            reasons = self.options.get("skipped")
            first = (
                max(reasons, key=lambda name: reasons[name]) if isinstance(reasons, dict) and reasons else "unusable"
            )
            notes.append(
                f"{count} of {self.n + count} samples could not be used ({first}); the score is that of the others"
            )
        notes += self._odd_data()
        if self.n == 1 and self.intervals:
            # Resampling a single sample gives an interval of zero width, which looks like certainty.
            notes.append("n is 1, so the intervals of these scores mean nothing")
        elif flat := [name for name, (low, high) in self.intervals.items() if low == high]:
            # Resampling a single sample of a class always returns that sample.
            notes.append(
                f"{', '.join(flat)}: the interval has zero width, because all resampled scores are equal (one sample per "
                "class, or the same score for every sample); the uncertainty is unknown"
            )
        return notes

    def _odd_data(self) -> list[str]:
        """Return warnings about data that inflate or limit a score on labelled images."""
        notes, largest = [], self.counts.get("largest_class", 0)
        chance = self.chance / 5 if self.headline.startswith("acc5") else self.chance
        if largest > 1 and largest / self.n > min(1.2 * chance, chance + 0.05):
            notes.append(
                f"the largest class has {100 * largest / self.n:.1f} % of the images, which is the acc1 of always naming it "
                f"(chance over the classes is {100 * chance:.1f} %); mean_per_class_recall weighs all classes equally"
            )
        recall = self.options.get("recall")
        if notes and isinstance(recall, dict) and len(recall) <= 12:
            notes.append("recall: " + ", ".join(f"{name} {100 * value:.1f}" for name, value in recall.items()))
        if isinstance(steps := self.options.get("steps"), int) and steps < _FEW_STEPS:
            notes.append(
                f"the probe was trained for {steps} steps only, so it may be far from its best. Raise epochs, or lower batch_size."
            )
        if self.options.get("scored_on_training"):
            notes.append("the scored images are the training images")
        if count := self.counts.get("groups"):
            notes.append(f"the interval of {self.headline} resamples the {count} groups of the test images")
        if count := self.counts.get("clusters"):
            notes.append(
                f"questions share images; for the intervals, the {self.n} questions are grouped into {count} independent clusters"
            )
        if (count := self.counts.get("classes_without_positive")) and self.task == "probe":
            notes.append(f"{count} class(es) have no positive among the test images and are not in the mean")
        if self.counts.get("only_class"):
            notes.append(
                "the interval of a mean over classes is unknown for a single class, so it is shown as 0 to 100"
            )
        if left_out := self.options.get("left_out_neighbours"):
            notes.append(
                f"{left_out} did not vote, because the test images would otherwise find themselves or their group"
            )
        if (count := self.counts.get("same_encoding")) and not self.options.get("scored_on_training"):
            notes.append(
                f"{count} of {self.n} images have the same encoding as a training image: the sets overlap, or the encoder maps different images to one encoding"
            )
        if (copies := self.options.get("copies_of_training_images")) and not self.counts.get("same_encoding"):
            notes.append(f"{copies} test images that were compared are copies of training images, so the sets overlap")
        if count := self.counts.get("classes_of_one_name"):
            notes.append(f"{count} class(es) have the same name as an earlier class and can never be predicted")
        return notes

    def left_out(self) -> str:
        """Return the files of the scored and the training folder that were skipped; empty if there are none."""
        notes = []
        for key, where in (("left_out", ""), ("left_out_of_training", " in training")):
            if isinstance(by_suffix := self.options.get(key), dict):
                listed = ", ".join(f"{n} {suffix}" for suffix, n in by_suffix.items())
                notes.append(f"{sum(by_suffix.values())} file(s) skipped{where}, not readable as images: {listed}")
        return "; ".join(notes)

    def odd(self) -> str:
        """Return why its cell in a table is marked: data that differ from the catalogue, or skipped files."""
        return "; ".join(
            text
            for text in (f"the data differ from the catalogue: {self.note}" if self.note else "", self.left_out())
            if text
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Result:
        """Return the result from `as_dict`, without predictions and keys. Raises `TypeError` for a field of another type."""
        fields = {name: value for name, value in content.items() if name in cls._fields}
        for name, kinds in _FIELD_KINDS.items():
            if name in fields and (not isinstance(fields[name], kinds) or isinstance(fields[name], bool)):
                raise TypeError(f"{name}: has the wrong type, got {type(fields[name]).__name__}")
        numbers = [*fields["metrics"].values(), *fields.get("counts", {}).values()]
        if not all(isinstance(value, int | float) for value in numbers) or fields["headline"] not in fields["metrics"]:
            raise TypeError("metrics are not numbers, or lack the headline metric")
        return cls(**{**fields, "intervals": {name: tuple(v) for name, v in fields.get("intervals", {}).items()}})

    def as_dict(self) -> dict[str, Any]:
        """Return everything except predictions and their keys, in a form for JSON."""
        intervals = {name: list(bounds) for name, bounds in self.intervals.items()}
        out = {**self._asdict(), "intervals": intervals, "interval": list(self.interval)}
        del out["predictions"], out["keys"]
        return out


def is_share(metric: str) -> bool:
    """Return whether a score is a share, which is shown in per cent and has a chance level."""
    return metric not in _METRIC_FORMATS


def axis_scale(metric: str) -> tuple[float, str]:
    """Return the display factor of a score on a plot's axis, and the axis unit."""
    times, _, name = _METRIC_FORMATS.get(metric, (100, 0, "per cent"))
    return times, name.strip()


def format_metric(metric: str, value: float, sign: str = "", unit: bool = False, digits: int = 1) -> str:
    """Format a score for display: per cent, or the metric's unit.

    Args:
        metric, value: the score.
        sign: "+" shows a plus, too.
        unit: append the unit, unless it is per cent.
        digits: after the decimal point, for per cent.
    """
    times, decimals, name = _METRIC_FORMATS.get(metric, (100, digits, ""))
    return f"{times * value:{sign}.{decimals}f}" + (name if unit else "")


def wilson(p: float, n: float, z: float = Z) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion (Wilson 1927) at 95 %.

    scipy's `binomtest(k, n).proportion_ci("wilson")` takes whole counts; here `p` may be a mean over classes, and `n`
    an effective number.
    """
    if n == 0:
        return 0.0, 1.0
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # Not beyond the proportion itself by rounding: at 0 of n, the lower end was above it.
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def bootstrap(sums: np.ndarray, counts: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return ratios of means under resampling of clusters with replacement: (draws, M).

    Args:
        sums: (n, M), each cluster's sum of M metrics.
        counts: (n, M), the number of items in each.
        draws, seed: number of draws, and random seed.
    """
    rng, n = np.random.default_rng(seed), len(sums)
    table, times = np.unique(np.concatenate([sums, counts], axis=1, dtype=np.float64), axis=0, return_counts=True)
    out, step = [], max(1, _BOOTSTRAP_BLOCK // len(table))
    for begin in range(0, draws, step):
        weights = rng.multinomial(n, times / n, min(step, draws - begin))  # equal clusters are drawn together
        total = weights @ table
        out.append(total[:, : sums.shape[1]] / np.maximum(total[:, sums.shape[1] :], 1))
    return np.concatenate(out)


def sum_groups(values: np.ndarray, groups: Sequence[str] | None) -> np.ndarray:
    """Return sums of rows (n, …) over the images of each group, in fp64; the rows themselves without groups.

    Images of one patient are not independent, so intervals resample patients.
    """
    if groups is None:
        return np.asarray(values, np.float64)
    _, place = np.unique(np.asarray(groups), return_inverse=True)
    out = np.zeros((place.max() + 1, *values.shape[1:]))
    np.add.at(out, place, values)
    return out


def percentiles(draws: np.ndarray) -> tuple[float, float]:
    """Return the middle 95 per cent of draws."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
