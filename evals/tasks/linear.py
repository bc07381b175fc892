"""DINO's linear probe (eval_linear.py): one layer, trained by SGD on batches that may be augmented."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError

from .result import Result
from .zeroshot import class_recall

Batches = Callable[[int], Iterator[tuple[Tensor, Tensor, int]]]


def train_probe(
    batches: Batches,
    width: int,
    classes: int,
    epochs: int,
    lr: float,
    seed: int,
    device: torch.device,
    report: Callable[[int, nn.Linear], None],
    summed: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> nn.Linear:
    """Train the layer; `report` receives it after every epoch.

    The loss is the mean over the global batch, so any number of ranks trains the same layer.

    Args:
        batches: an epoch's batches on this rank: features (b, width), labels (b,), and the size of the global batch.
        width, classes, epochs, seed, device: sizes and schedule.
        lr: for the whole batch (the official one is 0.001 * batch / 256).
        report: called with the layer.
        summed: sums a gradient over the ranks that train together.

    Raises:
        ConfigError: training diverged.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(width, classes)
    with torch.no_grad():
        layer.weight.normal_(0.0, 0.01, generator=generator)
        layer.bias.zero_()
    layer = layer.to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr, momentum=0.9, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=0)
    for epoch in range(epochs):
        for features, labels, size in batches(epoch):
            # Divide by the global size, so that the ranks' gradients sum to its mean.
            loss = F.cross_entropy(layer(features), labels, reduction="sum") / size
            optimizer.zero_grad()
            loss.backward()
            for p in layer.parameters():
                p.grad = summed(p.grad) if p.grad is not None else None
            optimizer.step()
        schedule.step()
        if not all(bool(p.isfinite().all()) for p in layer.parameters()):
            raise ConfigError(
                f"lr: the probe's weights are not finite after epoch {epoch + 1} of {epochs}, got a rate of {lr:g}. Give a smaller lr."
            )
        report(epoch, layer)
    return layer


@torch.no_grad()
def right_answers(layer: nn.Linear, features: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Return which samples are right with the best class and with the best five: bool (2, n)."""
    parts = []
    for x, y in zip(features, labels, strict=True):
        hits = layer(x.to(layer.weight.device)).topk(min(5, layer.out_features), dim=1).indices.cpu() == y[:, None]
        parts.append(torch.stack([hits[:, 0], hits.any(dim=1)]))
    return torch.cat(parts, dim=1) if parts else torch.zeros(2, 0, dtype=torch.bool)


def count_right(right: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return how many samples of each class are right: int64 (2, C), from `right_answers`."""
    return torch.stack([torch.bincount(labels[row], minlength=classes) for row in right])


def result(right: Sequence[Tensor], last: Tensor, labels: Tensor, classes: int) -> Result:
    """Score the counts of every epoch.

    The headline and `mean_per_class_recall` belong to the last epoch; `acc1_best` is the best epoch on this test set,
    as reported by eval_linear.py.

    Args:
        right: per epoch the counts of `count_right` over all ranks, (2, C).
        last: which test images are right after the last epoch, (n,) bool.
        labels: of the test images, (n,) int64.
        classes: number of classes.
    """
    n, totals = len(labels), [tuple(counts.sum(dim=1).tolist()) for counts in right]
    final, best = totals[-1], max(totals)
    recall, interval = class_recall(right[-1][0], labels)
    metrics = {"acc1": final[0] / n, "acc1_best": best[0] / n, "mean_per_class_recall": recall}
    if classes > 5:
        metrics |= {"acc5": final[1] / n, "acc5_best": best[1] / n}
    counts = {"largest_class": int(torch.bincount(labels).max())}
    intervals = {"mean_per_class_recall": interval}
    predictions = {"right": last.numpy(), "label": labels.numpy()}
    return Result("linear", n, "acc1", metrics, 1 / classes, intervals, {}, counts, predictions)
