"""Permutation-invariant linear probe of objects from slots of videos (Singh et al. 2024, Appendix E.1, after Dang-Nhu 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..result import Result, bootstrap, percentiles

HEADLINE = "position_r2"
_MAX_ITERATIONS = 100  # limit on iterations of E and M; each lowers the error, so it usually ends long before


class ProbedClip(NamedTuple):
    """Slots (T, K, D) of a clip; position (T, M, 3) of M objects; numbers by name (T, M, c); words by name, M of them."""

    slots: np.ndarray
    position: np.ndarray
    numbers: Mapping[str, np.ndarray]
    words: Mapping[str, Sequence[str]]


class SlotMatching(NamedTuple):
    """Matching of slots and objects.

    Attributes:
        weights: (D + 1, 3), from slots (and 1) to positions.
        slots_of: (M,) for each clip, the slot of each object.
        errors: mean squared error of each restart.
    """

    weights: np.ndarray
    slots_of: list[np.ndarray]
    errors: list[float]


def match_slots(clips: Sequence[ProbedClip], restarts: int, seed: int = 0, ridge: float = 1e-3) -> SlotMatching:
    """Match slots to objects, with one matching for all times of a clip.

    It alternates a linear map from matched slots to positions (E) with the assignment of least error under it (M),
    which is Hungarian because errors add up over objects. The best of `restarts` random initializations is returned.

    Args:
        clips, restarts, seed: clips and initializations.
        ridge: of the linear map, as a share of its inputs' mean square.
    """
    rng, errors = np.random.default_rng(seed), []
    best: tuple[np.ndarray, list[np.ndarray]] | None = None
    positions = np.concatenate([clip.position.reshape(-1, 3) for clip in clips])
    for _ in range(restarts):
        # A separate permutation per clip, because slots have no order.
        slots_of = [rng.permutation(clip.slots.shape[1])[: clip.position.shape[1]] for clip in clips]
        weights, error = np.zeros(0), np.inf
        for _ in range(_MAX_ITERATIONS):
            last, weights = error, fit_ridge(_collect_slots(clips, slots_of), positions, ridge)
            slots_of, error = assign_slots(clips, weights)
            # Stop at the level of rounding, because with equal errors both steps would alternate forever.
            if error >= last * (1 - 1e-9):
                break
        errors.append(error / len(positions))
        if best is None or errors[-1] < min(errors[:-1]):
            best = weights, slots_of
    assert best is not None
    return SlotMatching(*best, errors)


def assign_slots(clips: Sequence[ProbedClip], weights: np.ndarray) -> tuple[list[np.ndarray], float]:
    """Return for each clip the assignment of least error under a map to positions, and the summed squared error of all clips."""
    slots_of, total = [], 0.0
    for clip in clips:
        predicted = clip.slots @ weights[:-1] + weights[-1]  # (T, K, 3)
        # Squared distances, summed over time: (M, K).
        cost = (
            (clip.position**2).sum((0, 2))[:, None]
            + (predicted**2).sum((0, 2))[None]
            - 2 * np.einsum("tmc,tkc->mk", clip.position, predicted, optimize=True)
        )
        rows, columns = linear_sum_assignment(cost)
        slots_of.append(columns)
        total += float(cost[rows, columns].sum())
    return slots_of, total


def fit_ridge(x: np.ndarray, y: np.ndarray, ridge: float = 1e-3) -> np.ndarray:
    """Return ridge regression of y (n, c) on x (n, D) and one: (D + 1, c), fp64; the offset is not penalised."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    middle, level = x.mean(0), y.mean(0)
    gram = (x - middle).T @ (x - middle)
    # Relative to the data's scale, so that wide and narrow slots are penalised alike.
    gram[np.diag_indices(len(gram))] += ridge * max(gram.diagonal().mean(), 1e-12)
    weights = np.linalg.solve(gram, (x - middle).T @ (y - level))
    return np.concatenate([weights, (level - middle @ weights)[None]])


def score(
    fit: Sequence[ProbedClip], held_out: Sequence[ProbedClip], restarts: int = 10, seed: int = 0, ridge: float = 1e-3
) -> Result:
    """Return R2 of positions and other numbers, and accuracy of words, on held-out clips, whose matching also comes from positions.

    R2 is over all coordinates, relative to the mean of the clips used for fitting. Intervals resample clips.

    Args:
        fit, held_out: clips with at most as many objects as slots.
        restarts, seed, ridge: see `match_slots`.
    """
    matching = match_slots(fit, restarts, seed, ridge)
    others, _ = assign_slots(held_out, matching.weights)
    x = _collect_slots(fit, matching.slots_of)
    # Other numbers use the matching from positions, because only positions distinguish objects.
    sums, counts = {}, {}
    for name in ("position", *fit[0].numbers):
        true = [clip.position if name == "position" else clip.numbers[name] for clip in (*fit, *held_out)]
        ours = np.concatenate([t.reshape(-1, t.shape[-1]) for t in true[: len(fit)]])
        weights, level = fit_ridge(x, ours, ridge), ours.mean(0)
        rest, whole = [], []
        for clip, own, t in zip(held_out, others, true[len(fit) :], strict=True):
            predicted = clip.slots[:, own] @ weights[:-1] + weights[-1]
            rest.append(((predicted - t) ** 2).sum())
            whole.append(((t - level) ** 2).sum())
        # A constant has no R2; decided relative to its size, because a mean of equal numbers has a rounding error.
        size = 1e-9 * max(float(np.abs(ours).max(initial=0)), 1e-12)
        spread = float(np.sqrt(np.sum(whole) / max(1, sum(t.size for t in true[len(fit) :]))))
        if name != "position" and min(spread, float(np.ptp(ours, axis=0).max(initial=0))) <= size:
            continue
        scale = max(float(np.mean(whole)), 1e-12)
        sums[f"{name}_r2"], counts[f"{name}_r2"] = (
            (np.array(whole) - np.array(rest)) / scale,
            np.array(whole) / scale,
        )
    for name in fit[0].words:
        vocabulary = sorted({word for clip in fit for word in clip.words[name]})
        ours = np.concatenate(
            [
                np.tile(np.eye(len(vocabulary))[[vocabulary.index(w) for w in c.words[name]]], (len(c.slots), 1))
                for c in fit
            ]
        )
        weights, right, of = fit_ridge(x, ours, ridge), [], []
        for clip, own in zip(held_out, others, strict=True):
            predicted = np.array(vocabulary)[(clip.slots[:, own] @ weights[:-1] + weights[-1]).argmax(-1)]  # (T, M)
            right.append((predicted == np.array(clip.words[name])).sum())
            of.append(predicted.size)
        sums[f"{name}_accuracy"], counts[f"{name}_accuracy"] = np.array(right, float), np.array(of, float)
    return _result(sums, counts, matching, (len(fit), len(held_out)), restarts, ridge)


def _result(
    sums: dict[str, np.ndarray],
    counts: dict[str, np.ndarray],
    matching: SlotMatching,
    clips: tuple[int, int],
    restarts: int,
    ridge: float,
) -> Result:
    names = list(sums)
    table, of = np.stack([sums[n] for n in names], 1), np.stack([counts[n] for n in names], 1)
    # In large units, because the bootstrap treats denominators as counts of at least one.
    draws = bootstrap(table * 1e6, of * 1e6)
    options: dict[str, Any] = {
        "restarts": restarts,
        "ridge": ridge,
        "errors": [round(e, 6) for e in sorted(matching.errors)],
        "interval": "bootstrap over held-out clips",
    }
    return Result(
        "slot_probe",
        clips[1],
        HEADLINE,
        {name: float(table[:, i].sum() / of[:, i].sum()) for i, name in enumerate(names)},
        0.0,
        {name: percentiles(draws[:, i]) for i, name in enumerate(names)},
        options,
        {"fitted_clips": clips[0]},
        {
            name: np.divide(table[:, i], of[:, i], where=of[:, i] > 0, out=np.full(len(of), np.nan)).astype(np.float32)
            for i, name in enumerate(names)
        },
    )


def _collect_slots(clips: Sequence[ProbedClip], slots_of: Sequence[np.ndarray]) -> np.ndarray:
    """Return the slots of all objects, clip by clip, time by time: (n, D)."""
    return np.concatenate(
        [clip.slots[:, own].reshape(-1, clip.slots.shape[-1]) for clip, own in zip(clips, slots_of, strict=True)]
    )
