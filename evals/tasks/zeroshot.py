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


def with_macro_f1(result: Result) -> Result:
    """Add `f1_macro`: the F1 score averaged over the classes that occur in the labels, as WILDS computes it for iWildCam."""
    labels, predicted = result.predictions["label"], result.predictions["predicted"][:, 0]
    pairs, counts = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
    rng, total = np.random.default_rng(0), int(counts.sum())
    (true, named), draws = pairs.T, []
    for _ in range(DRAWS):
        draws.append(macro_f1(true, named, rng.multinomial(total, counts / total)))
    return result._replace(
        metrics={**result.metrics, "f1_macro": macro_f1(true, named, counts)},
        intervals={**result.intervals, "f1_macro": percentiles(np.asarray(draws))},
    )


def macro_f1(labels: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean F1 score over the classes in `labels` (n,), with a weight per sample: how often it occurs."""
    present, size = np.unique(labels), int(max(labels.max(), predicted.max())) + 1
    right = labels == predicted
    # Twice the right images of a class, divided by its images plus those predicted as it.
    both = (np.bincount(labels, weights, size) + np.bincount(predicted, weights, size))[present]
    twice = 2 * np.bincount(labels[right], weights[right], size)[present]
    # A class that a resampled set neither contains nor predicts does not count there.
    return float((twice[both > 0] / both[both > 0]).mean())


def worst_group_accuracy(right: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> float:
    """Return the lowest accuracy of a group, for groups (n,) numbered from 0 and a weight per sample."""
    total = np.bincount(groups, weights)
    hits = np.bincount(groups, weights * right)
    return float((hits[total > 0] / total[total > 0]).min())


def with_groups(result: Result, groups: Sequence[int | str]) -> Result:
    """Add `acc1_worst_group` (and `acc5_worst_group`): the accuracy in the group of images where it is lowest; that of every group is in the options.

    Args:
        result: the result from `score`.
        groups: group of each image, such as its region.
    """
    names, place = np.unique(np.asarray(groups), return_inverse=True)
    sizes = np.bincount(place)
    hit = result.predictions["predicted"] == result.predictions["label"][:, None]
    metrics, intervals, options = dict(result.metrics), dict(result.intervals), dict(result.options)
    for metric, right in (("acc1", hit[:, 0]), ("acc5", hit.any(axis=1))):
        if metric not in metrics:
            continue
        accuracy = np.bincount(place, weights=right) / sizes
        worst = int(accuracy.argmin())
        metrics[f"{metric}_worst_group"] = float(accuracy[worst])
        # The interval of that group, because the lowest of resampled accuracies would be too low.
        intervals[f"{metric}_worst_group"] = wilson(float(accuracy[worst]), int(sizes[worst]))
        options[f"{metric}_by_group"] = {
            str(name): [round(float(value), 6), int(n)] for name, value, n in zip(names, accuracy, sizes, strict=True)
        }
    predictions = {**result.predictions, "group": np.asarray(groups)}
    return result._replace(metrics=metrics, intervals=intervals, options=options, predictions=predictions)


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
    # The interval covers classes, because the score is a mean over classes. With a single class, it is unknown.
    half = 1.959964 * average.std().item() / len(average) ** 0.5 if len(average) > 1 else 1.0
    return Result(
        task,
        len(labels),
        "mean_average_precision",
        {"mean_average_precision": value},
        chance,
        {"mean_average_precision": (max(0.0, value - half), min(1.0, value + half))},
        counts={
            "classes_without_positive": int((labels.sum(0) == 0).sum()),
            **({"only_class": 1} if len(average) == 1 else {}),
        },
        predictions={"scores": scores.numpy(), "average_precision": every.numpy()},
    )
