"""Zero-shot classification with prompt templates, as in CLIP and open_clip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .result import DRAWS, Result, percentiles, wilson


def prompts(classnames: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Fill in every template for each class in turn; `{c}` is the class name."""
    return [template.replace("{c}", name) for name in classnames for template in templates]


def classifier(text: Tensor, classes: int) -> Tensor:
    """Return class vectors (classes, D) from prompt encodings (classes * templates, D): mean over templates, then unit norm.

    With SPARO, the slots of a class vector are not normalised again (as in sparo-clip): a slot in which prompts
    disagree has less weight.
    """
    # Normalise prompts before averaging, so that long encodings do not dominate.
    per_class = F.normalize(text.float(), dim=-1).view(classes, -1, text.shape[-1])
    return F.normalize(per_class.mean(dim=1), dim=-1)


def score(images: Iterable[Tensor], weights: Tensor, labels: Tensor) -> Result:
    """Return acc1, acc5 (with at least five classes, as in clip-benchmark) and mean per-class recall. Ties go to the lower class.

    Args:
        images: encodings (n_i, D) in blocks.
        weights: class vectors (C, D).
        labels: (n,) int64.
    """
    parts = []
    for block in images:
        logits = F.normalize(block.float(), dim=-1) @ weights.T
        parts.append(rank_classes(logits, min(5, len(weights))))
    return result_from_ranking(torch.cat(parts), labels, len(weights), "zeroshot")


def rank_classes(logits: Tensor, k: int) -> Tensor:
    """Return the k best classes (n, k), best first; the lower class comes first among ties."""
    # One more than needed, which shows ties at the border.
    value, top_classes = logits.topk(min(k + 1, logits.shape[1]), dim=1)
    tied = (value[:, 1:] == value[:, :-1]).any(dim=1).nonzero().flatten()  # topk may take any of them
    if len(tied):
        top_classes[tied] = logits[tied].sort(dim=1, descending=True, stable=True).indices[:, : top_classes.shape[1]]
    return top_classes[:, :k]


def result_from_ranking(top_classes: Tensor, labels: Tensor, classes: int, task: str) -> Result:
    """Return the result from each sample's best classes (n, min(5, C))."""
    right = top_classes == labels[:, None]
    first = right[:, 0]
    metrics = {"acc1": first.double().mean().item()}
    intervals = {"acc1": wilson(metrics["acc1"], len(labels))}
    if classes >= 5:
        metrics["acc5"] = right.any(dim=1).double().mean().item()
        intervals["acc5"] = wilson(metrics["acc5"], len(labels))
    hits = torch.bincount(labels, weights=first.double(), minlength=classes)
    metrics["mean_per_class_recall"], intervals["mean_per_class_recall"] = class_recall(hits, labels)
    predictions = {"predicted": top_classes.numpy(), "right": first.numpy(), "label": labels.numpy()}
    counts = {"largest_class": int(torch.bincount(labels).max())}
    return Result(task, len(labels), "acc1", metrics, 1 / classes, intervals, {}, counts, predictions)


def class_recall(hits: Tensor, labels: Tensor) -> tuple[float, tuple[float, float]]:
    """Return the mean recall over the classes that occur (balanced accuracy), and its 95 % interval.

    Args:
        hits: (C,), number of correct samples of each class.
        labels: (n,) int64.
    """
    support = torch.bincount(labels, minlength=len(hits))
    recall, of = (hits.double()[support > 0] / support[support > 0]).numpy(), support[support > 0].numpy()
    # Resample within classes: ten images of a rare class weigh as much as a thousand of another.
    resampled = np.random.default_rng(0).binomial(of, np.clip(recall, 0, 1), (DRAWS, len(of))) / of
    return float(recall.mean()), percentiles(resampled.mean(1))


def score_multilabel(images: Iterable[Tensor], weights: Tensor, labels: Tensor) -> Result:
    """Return the mean average precision over classes, as in clip-benchmark: precision at every positive's rank.

    Args:
        images, weights: as in `score`.
        labels: (n, C) of zeros and ones. A class without a positive counts as 0, as in clip-benchmark;
            `classes_without_positive` counts them.
    """
    scores = torch.cat([F.normalize(block.float(), dim=-1) @ weights.T for block in images])
    return multilabel_result(scores, labels, "zeroshot")


def average_precisions(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of every class, fp64 (C,), of scores (n, C); 0 for a class without a positive."""
    order = scores.sort(dim=0, descending=True, stable=True).indices
    truth = labels.gather(0, order).double()
    precision = truth.cumsum(0) / torch.arange(1, len(truth) + 1).double()[:, None]
    return (precision * truth).sum(0) / truth.sum(0).clamp(min=1)


def multilabel_result(scores: Tensor, labels: Tensor, task: str, only_present: bool = False) -> Result:
    """Return the result from scores (n, C) of labels (n, C); see `score_multilabel`.

    With `only_present`, classes without a positive are not in the mean.
    """
    every = average_precisions(scores, labels)
    present = labels.sum(0) > 0
    counted = present if only_present and present.any() else torch.ones_like(present)
    average = every[counted]
    value = average.mean().item()
    chance = labels[:, counted].double().mean().item()
    # Over classes, because images do not contribute separately; of a single class, it is unknown.
    half = 1.959964 * average.std().item() / len(average) ** 0.5 if len(average) > 1 else 1.0
    return Result(
        task,
        len(labels),
        "mean_average_precision",
        {"mean_average_precision": value},
        chance,
        {"mean_average_precision": (max(0.0, value - half), min(1.0, value + half))},
        counts={"classes_without_positive": int((labels.sum(0) == 0).sum())},
        predictions={"scores": scores.numpy(), "average_precision": every.numpy()},
    )
