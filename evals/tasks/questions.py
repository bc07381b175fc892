"""Scores of questions about images and texts: choices, matching (Winoground; Thrush et al. 2022), and paraphrases (SugarCrepe++).

An answer is right if some sums of similarities exceed others. Each comparison is a row of coefficients on the
similarities (m, k) of a question's m images and k texts, so that slots can be scored by the same rows: a similarity is
a sum over slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .clusters import assign_clusters, share_interval
from .result import DRAWS, Result, percentiles, wilson

Ties = Literal["lose", "first"]
_MOST_MATCHED = 6  # images of a question up to which all assignments are compared
_BLOCK = 2**24  # products of images and texts that are stored at once
_MANY_KINDS = (
    20  # largest number of kinds with a separate metric each; if there are more, all are listed in the result's options
)


class Comparisons(NamedTuple):
    """Comparisons that must all be positive for a right answer.

    Attributes:
        rows: (K, m, k) fp64, coefficients on the similarities.
        tie: (K,) bool, True if zero counts as positive.
    """

    rows: Tensor
    tie: Tensor

    def decide(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        """Return from similarities (b, m, k) the right answers (b,) bool, and those that a comparison of equal similarities decides."""
        # fp64, in which sums of a few fp32 numbers are exact enough for equal ones to stay equal.
        margin = torch.einsum("bij,cij->bc", similarity.double(), self.rows)
        zero = margin == 0
        return ((margin > 0) | (self.tie & zero)).all(dim=1), zero.any(dim=1) & (margin >= 0).all(dim=1)


class Form(NamedTuple):
    """Metrics of a kind of question; the first one is the headline.

    Attributes:
        comparisons: by metric.
        chance: score of random similarities, by metric.
    """

    comparisons: Mapping[str, Comparisons]
    chance: Mapping[str, float]


def choice(shape: tuple[int, int], answer: int, ties: Ties = "lose") -> Form:
    """Return the form of one right text among k (or of one right image among m): the right one must be the most similar.

    Args:
        shape: (1, k) or (m, 1).
        answer: number of the right one.
        ties: `lose`, or `first`: the first of equally similar ones is chosen, as by `argmax`.
    """
    count = max(shape)
    others = [i for i in range(count) if i != answer]
    rows = torch.zeros(len(others), count, dtype=torch.float64)
    rows[:, answer] = 1
    rows[torch.arange(len(others)), others] = -1
    tie = torch.tensor([ties == "first" and other > answer for other in others])
    return Form({"acc": Comparisons(rows.view(-1, *shape), tie)}, {"acc": 1 / count})


def matching(count: int) -> Form:
    """Return the form of m images with a text each; ties lose.

    text: for every image, its own text is the most similar. image: for every text, its own image is. group: both.
    group_match: among all one-to-one assignments, the right one has the largest sum (Zhu et al. 2025, GroupMatch); for at
    most six images, because the number of assignments grows fast.
    """
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    text = torch.stack([_row(count, [(i, i)], [(i, j)]) for i, j in pairs])
    image = torch.stack([_row(count, [(i, i)], [(j, i)]) for i, j in pairs])
    own = [(i, i) for i in range(count)]
    comparisons = {"group": torch.cat([text, image]), "text": text, "image": image}
    one_side = (1 / count) ** count
    group = 1.0
    # The largest of the similarities that are still compared must be a right one, m times in a row.
    for left in range(count, 0, -1):
        compared = left + count * (count - 1) - (count - left) * (count - left - 1)
        group *= left / compared
    chance = {"group": group, "text": one_side, "image": one_side}
    if count <= _MOST_MATCHED:
        others = [order for order in itertools.permutations(range(count)) if order != tuple(range(count))]
        comparisons["group_match"] = torch.stack([_row(count, own, list(enumerate(order))) for order in others])
        chance["group_match"] = 1 / (len(others) + 1)
    return Form({name: Comparisons(rows, torch.zeros(len(rows)).bool()) for name, rows in comparisons.items()}, chance)


def paraphrases() -> Form:
    """Return the form of an image with two right texts and a wrong one (SugarCrepe++; Dumpala et al. 2024); ties lose.

    itt: both right texts are more similar to the image than the wrong one. first, second: this one of them is. The
    chance level of `tot` (`text_only_paraphrases`) is included.
    """
    rows = torch.tensor([[[1, 0, -1]], [[0, 1, -1]]], dtype=torch.float64)
    comparisons = {"itt": rows, "first": rows[:1], "second": rows[1:]}
    chance = {"itt": 1 / 3, "tot": 1 / 3, "first": 1 / 2, "second": 1 / 2}
    return Form({name: Comparisons(of, torch.zeros(len(of)).bool()) for name, of in comparisons.items()}, chance)


def text_only_paraphrases(texts: Tensor) -> Tensor:
    """Return (b,) bool of texts (b, 3, D): the first two are more similar to each other than either is to the third (TOT of SugarCrepe++)."""
    first, second, wrong = texts.unbind(dim=1)
    both = (first * second).sum(-1)
    return (both > (first * wrong).sum(-1)) & (both > (second * wrong).sum(-1))


def _row(count: int, plus: Sequence[tuple[int, int]], minus: Sequence[tuple[int, int]]) -> Tensor:
    row = torch.zeros(count, count, dtype=torch.float64)
    for i, j in plus:
        row[i, j] += 1
    for i, j in minus:
        row[i, j] -= 1
    return row


def similarities(images: Tensor, texts: Tensor) -> Tensor:
    """Return the products (b, m, k) of images (b, m, D) and texts (b, k, D); equal vectors have exactly equal products."""
    # Not a matrix product, whose kernels may add the same numbers in another order at another place.
    parts = max(1, -(-images.shape[0] * images.shape[1] * texts.shape[1] * images.shape[2] // _BLOCK))
    return torch.cat([
        (i[:, :, None] * t[:, None]).sum(-1) for i, t in zip(images.chunk(parts), texts.chunk(parts), strict=True)
    ])  # fmt: skip


class Answers(NamedTuple):
    """Answers to n questions.

    Attributes:
        right: right answers (n,) bool by metric; the first metric is the headline.
        chance: score of random similarities (n,) by metric.
        kinds, keys: category and name of each question.
        groups: (metric, group) pairs of each question; a group is right if all its questions are.
        images: names of the images of each question; answers about one image are not independent. Default: independent.
    """

    right: Mapping[str, Tensor]
    chance: Mapping[str, Tensor]
    kinds: Sequence[str]
    keys: Sequence[str]
    groups: Sequence[Sequence[tuple[str, str]]] = ()
    images: Sequence[Iterable[Hashable]] = ()


def score(task: str, answers: Answers, average: Literal["macro", "micro"] = "micro") -> Result:
    """Return accuracies with intervals as the result of `task`: means over questions (micro), or over kinds (macro)."""
    kinds = np.asarray(answers.kinds)
    names = [kind for kind in dict.fromkeys(kinds.tolist()) if kind]
    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    options: dict[str, object] = {"average": average}
    clusters = assign_clusters(answers.images) if answers.images else None
    strata = kinds if average == "macro" else np.zeros(len(kinds))
    for metric, correct in answers.right.items():
        rows = correct.numpy()
        by_kind = {kind: rows[kinds == kind] for kind in names} or {"": rows}
        if average == "macro":
            metrics[metric], intervals[metric] = _macro(list(by_kind.values()))
        else:
            metrics[metric] = float(rows.mean())
            intervals[metric] = wilson(metrics[metric], len(rows))
        if clusters is not None:
            intervals[metric] = share_interval(rows, strata, clusters)
        if len(names) < 2:
            continue
        if len(names) > _MANY_KINDS:
            options[f"{metric}_by_kind"] = {kind: [float(of.mean()), len(of)] for kind, of in by_kind.items()}
        else:
            metrics |= {f"{metric}/{kind}": float(of.mean()) for kind, of in by_kind.items()}
            intervals |= {f"{metric}/{kind}": _kind_interval(rows, kinds == kind, clusters) for kind in by_kind}
    headline = next(iter(answers.right))
    weight = weights(kinds, average)
    chance = {metric: float((values.numpy() * weight).sum()) for metric, values in answers.chance.items()}
    for metric, (right, firsts, luck) in _by_group(answers, headline).items():
        of_groups = None if clusters is None else clusters[firsts]
        metrics[metric], chance[metric] = float(right.mean()), luck
        intervals[metric] = _kind_interval(right, np.ones(len(right), bool), of_groups)
    options |= {f"chance_{metric}": value for metric, value in chance.items() if metric != headline}
    predictions = {name: right.numpy() for name, right in answers.right.items()}
    predictions |= {"right": predictions[headline], "kind": kinds}
    counts: dict[str, int] = {}
    if clusters is not None:
        predictions["cluster"], counts["clusters"] = clusters, int(clusters.max()) + 1
    keys = tuple(answers.keys)
    return Result(task, len(keys), headline, metrics, chance[headline], intervals, options, counts, predictions, keys)


def _kind_interval(right: np.ndarray, here: np.ndarray, clusters: np.ndarray | None) -> tuple[float, float]:
    """Return the interval of the share of right answers among those marked in `here` (n,) bool."""
    if clusters is None:
        return wilson(float(right[here].mean()), int(here.sum()))
    return share_interval(right[here], np.zeros(int(here.sum())), clusters[here])


def _macro(by_kind: Sequence[np.ndarray]) -> tuple[float, tuple[float, float]]:
    """Return the unweighted mean over kinds, and its interval by a bootstrap within kinds."""
    rng = np.random.default_rng(0)
    draws = [rng.binomial(len(of), of.mean(), DRAWS) / len(of) for of in by_kind]
    return float(np.mean([of.mean() for of in by_kind])), percentiles(np.mean(draws, axis=0))


def _by_group(answers: Answers, headline: str) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Return, by metric, which groups have only right answers (g,) bool, the number of each group's first question, and the share by chance."""
    members: dict[str, dict[str, list[int]]] = {}
    for number, groups in enumerate(answers.groups):
        for metric, name in groups:
            members.setdefault(metric, {}).setdefault(name, []).append(number)
    right, chance = answers.right[headline].numpy(), answers.chance[headline].numpy()
    return {
        metric: (
            np.asarray([right[numbers].all() for numbers in groups.values()]),
            np.asarray([numbers[0] for numbers in groups.values()]),
            float(np.mean([chance[numbers].prod() for numbers in groups.values()])),
        )
        for metric, groups in members.items()
    }


def weights(kinds: np.ndarray, average: str) -> np.ndarray:
    """Return each question's weight in the average, (n,)."""
    if average == "micro":
        return np.full(len(kinds), 1 / len(kinds))
    _, place, sizes = np.unique(kinds, return_inverse=True, return_counts=True)
    return 1 / (len(sizes) * sizes[place])
