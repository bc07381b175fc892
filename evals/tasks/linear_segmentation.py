"""A linear layer from patch features to classes of pixels, as in DINOv2's linear segmentation: batch statistics, layer, bilinear enlargement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.errors import DataError

from .result import Result, bootstrap, percentiles, sum_groups

Rows = Callable[[Tensor], Tensor]


class SegmentationTraining(NamedTuple):
    """Training options of the layer: AdamW with a cosine per step."""

    lr: float
    epochs: int
    batch_size: int
    seed: int
    device: torch.device


class PatchFeatures(NamedTuple):
    """Features by number, `rows` (m,) int64 -> (m, P, D) fp32 of a square grid, and masks (n, S, S) of class numbers."""

    rows: Rows
    masks: np.ndarray


def score(
    train: PatchFeatures,
    test: PatchFeatures,
    classes: int,
    ignore: int | None,
    how: SegmentationTraining,
    groups: Sequence[str] | None = None,
) -> Result:
    """Train on one set and return mIoU and pixel accuracy of the other.

    mIoU is the mean over classes of intersection over union, counted over all images together; classes that are in
    neither the truth nor the prediction are excluded. Intervals resample test images, or their `groups`.

    Raises:
        DataError: a set without counted pixels.
    """
    for name, part in (("train", train), ("test", test)):
        if ignore is not None and (part.masks == ignore).all():
            raise DataError(f"{name}: every pixel is {ignore}, which is ignored. Correct the key `ignore`.")
    layer, center, scale = _train(train, classes, ignore, how)
    tables = []
    for rows in torch.arange(len(test.masks)).split(how.batch_size):
        with torch.no_grad():
            logits = _logits(test.rows(rows).to(how.device), layer, center, scale, test.masks.shape[-1])
        predicted = logits.argmax(1).cpu().numpy()
        tables += [
            class_counts(true, own, classes, ignore)
            for true, own in zip(test.masks[rows.numpy()], predicted, strict=True)
        ]
    return mean_iou("linear_segmentation", np.stack(tables), groups)


def _train(
    data: PatchFeatures, classes: int, ignore: int | None, how: SegmentationTraining
) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    """Return the layer, and mean and standard deviation of its inputs over the training set."""
    n, size = data.masks.shape[:2]
    total, square, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for rows in torch.arange(n).split(256):
        flat = data.rows(rows).flatten(0, 1).double()
        total, square, count = total + flat.sum(0), square + flat.square().sum(0), count + len(flat)
    center = total / count
    scale = (square / count - center**2).clamp(min=1e-12).sqrt()
    center, scale = center.float().to(how.device), scale.float().to(how.device)
    random = torch.Generator().manual_seed(how.seed)
    layer = torch.nn.Linear(len(center), classes)
    with torch.no_grad():
        layer.weight.normal_(0, 0.01, generator=random)
        # A class without a training pixel that counts is never predicted.
        present = np.setdiff1d(data.masks, [] if ignore is None else [ignore])
        seen = torch.from_numpy(np.isin(np.arange(classes), present))
        layer.bias.copy_(torch.where(seen, 0.0, -1e4))
    layer.to(how.device)
    optimizer = torch.optim.AdamW(layer.parameters(), how.lr, weight_decay=1e-4)
    steps, step = how.epochs * -(-n // how.batch_size), 0
    for _ in range(how.epochs):
        for rows in torch.randperm(n, generator=random).split(how.batch_size):
            optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / steps)) * how.lr
            masks = torch.from_numpy(data.masks[rows.numpy()].astype(np.int64)).to(how.device)
            logits = _logits(data.rows(rows).to(how.device), layer, center, scale, size)
            there = torch.ones_like(masks, dtype=torch.bool) if ignore is None else masks != ignore
            # A batch without a counted pixel would have the loss 0 / 0.
            loss = F.cross_entropy(
                logits, masks.where(there, -100), ignore_index=-100, reduction="sum"
            ) / there.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return layer, center, scale


def _logits(patches: Tensor, layer: torch.nn.Linear, center: Tensor, scale: Tensor, size: int) -> Tensor:
    """Return logits (n, C, size, size) of patch features (n, P, D)."""
    logits = layer((patches - center) / scale)
    side = math.isqrt(patches.shape[1])
    return F.interpolate(logits.mT.unflatten(2, (side, side)), (size, size), mode="bilinear", align_corners=False)


def class_counts(true: np.ndarray, predicted: np.ndarray, classes: int, ignore: int | None) -> np.ndarray:
    """Return the number of right, true and predicted pixels of each class, (3, C)."""
    there = slice(None) if ignore is None else true != ignore
    own, guess = true[there].reshape(-1), predicted[there].reshape(-1)
    return np.stack([np.bincount(labels, minlength=classes) for labels in (own[own == guess], own, guess)])


def mean_iou(task: str, counts_by_image: np.ndarray, groups: Sequence[str] | None = None) -> Result:
    """Return the result of a task from the images' counts (n, 3, C); see `class_counts`."""
    hits, true, predicted = counts_by_image.swapaxes(0, 1)
    union = true + predicted - hits
    here = union.sum(0) > 0
    iou = hits.sum(0)[here] / union.sum(0)[here]
    draws = bootstrap(sum_groups(hits[:, here], groups), sum_groups(union[:, here], groups)).mean(1)
    pixels, right, truth = true.sum(1), hits.sum(1), true.sum(0)
    metrics = {"miou": float(iou.mean()), "pixel_accuracy": float(right.sum() / max(pixels.sum(), 1))}
    intervals = {
        "miou": percentiles(draws),
        "pixel_accuracy": percentiles(
            bootstrap(sum_groups(right[:, None], groups), sum_groups(pixels[:, None], groups))[:, 0]
        ),
    }
    options = {
        "iou": dict(zip(np.flatnonzero(here).tolist(), iou.tolist(), strict=True)),
        "counted": "over all images together",
    }
    counts = {"groups": len(set(groups))} if groups else {}
    return Result(task, len(hits), "miou", metrics, _chance(truth), intervals, options, counts)


def _chance(truth: np.ndarray) -> float:
    """Return the mIoU of the better guess, from the pixels (C,) of each class: always the largest class, or a random class for each pixel."""
    share, drawn = truth / max(truth.sum(), 1), 1 / len(truth)
    # Of a random class, the expected intersection and union; classes that do not occur are drawn, too, and have 0.
    random = float((share * drawn / (share + drawn - share * drawn)).mean())
    return max(float(share.max()) / max(int((truth > 0).sum()), 1), random)


def largest_label(masks: Iterable[np.ndarray], ignore: int | None) -> int:
    """Return the largest class number in label maps; -1 if all pixels are ignored."""
    counted = (mask if ignore is None else mask[mask != ignore] for mask in masks)
    return max((int(labels.max()) for labels in counted if labels.size), default=-1)
