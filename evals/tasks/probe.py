"""Linear probes: clip-benchmark's (the SPARO paper's) and DINO's (eval_linear.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler

from sparo_train.core.errors import ConfigError, DataError

from .result import Result
from .zeroshot import class_recall, rank_classes, result_from_ranking

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
def count_right(layer: nn.Linear, features: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Return how many samples of each class are right among the best one and the best five: int64 (2, C)."""
    right = torch.zeros(2, layer.out_features, dtype=torch.int64)
    for x, y in zip(features, labels, strict=True):
        hits = layer(x.to(layer.weight.device)).topk(min(5, layer.out_features), dim=1).indices.cpu() == y[:, None]
        for row, hit in zip(right, (hits[:, 0], hits.any(dim=1)), strict=True):
            row += torch.bincount(y[hit], minlength=len(row))
    return right


def result(right: Sequence[Tensor], labels: Tensor, classes: int) -> Result:
    """Score the counts of every epoch.

    The headline and `mean_per_class_recall` belong to the last epoch; `acc1_best` is the best epoch on this test set,
    as reported by eval_linear.py.

    Args:
        right: per epoch the counts of `count_right` over all ranks, (2, C).
        labels: of the test images, (n,) int64.
        classes: number of classes.
    """
    n, totals = len(labels), [tuple(counts.sum(dim=1).tolist()) for counts in right]
    last, best = totals[-1], max(totals)
    recall, interval = class_recall(right[-1][0], labels)
    metrics = {"acc1": last[0] / n, "acc1_best": best[0] / n, "mean_per_class_recall": recall}
    if classes > 5:
        metrics |= {"acc5": last[1] / n, "acc5_best": best[1] / n}
    counts = {"largest_class": int(torch.bincount(labels).max())}
    return Result("linear", n, "acc1", metrics, 1 / classes, {"mean_per_class_recall": interval}, {}, counts)


DECAYS = np.logspace(-6, 2, num=97).tolist()
_COARSE, _STEPS = 16, (8, 4, 2, 1)


class Labelled(NamedTuple):
    """Features by number: `rows` (m,) int64 -> (m, D) fp32, and labels (n,) int64."""

    rows: Callable[[Tensor], Tensor]
    labels: Tensor

    def only(self, numbers: Tensor) -> Labelled:
        """Return some of them."""
        return Labelled(lambda at: self.rows(numbers[at]), self.labels[numbers])

    def with_more(self, other: Labelled) -> Labelled:
        """Concatenate with others."""

        def rows(at: Tensor) -> Tensor:
            mine = at < len(self.labels)
            first, second = self.rows(at[mine]), other.rows(at[~mine] - len(self.labels))
            out = torch.empty(len(at), (first if len(first) else second).shape[1])
            out[mine], out[~mine] = first, second
            return out

        return Labelled(rows, torch.cat([self.labels, other.labels]))


class Probes(NamedTuple):
    """P linear layers: weight (P, C, D), bias (P, C)."""

    weight: Tensor
    bias: Tensor

    def logits(self, x: Tensor) -> Tensor:
        """Return logits (n, P, C) for (n, D)."""
        # One product for all decays, which only differ in their weights.
        p, c, d = self.weight.shape
        return torch.addmm(self.bias.flatten(), x, self.weight.view(p * c, d).T).view(-1, p, c)


class Training(NamedTuple):
    """Training options of probes; the defaults are clip-benchmark's command line."""

    lr: float = 0.1
    epochs: int = 10
    batch_size: int = 64
    seed: int = 0
    device: torch.device = torch.device("cpu")


def train_probes(data: Labelled, classes: int, decays: Sequence[float], how: Training) -> Probes:
    """Train one layer per weight decay, all from the same initial weights and in the same order of the data.

    These are the ones that `torch.manual_seed(how.seed)`, `nn.Linear` and a shuffling DataLoader produce one after the
    other, so every layer equals the one from a separate training (up to fp32 rounding).
    """
    width, count, n = data.rows(torch.zeros(1, dtype=torch.int64)).shape[1], len(decays), len(data.labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        layer = torch.nn.Linear(width, classes)
        orders = []
        for _ in range(how.epochs):
            # Drawn and discarded, because otherwise shuffles would differ from clip-benchmark's.
            torch.empty((), dtype=torch.int64).random_()  # a DataLoader's seed for its workers
            orders.append(torch.tensor(list(RandomSampler(range(n)))))
    weight = layer.weight.detach().expand(count, -1, -1).contiguous().to(how.device)
    bias = layer.bias.detach().expand(count, -1).contiguous().to(how.device)
    # Views, so that the optimizer updates the weights of the products.
    each = [[w, b] for w, b in zip(weight.unbind(), bias.unbind(), strict=True)]
    groups = [{"params": pair, "weight_decay": decay} for pair, decay in zip(each, decays, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=how.lr, fused=True)
    probes, step, steps = Probes(weight, bias), 0, how.epochs * -(-n // how.batch_size)
    for order in orders:
        for rows in order.split(how.batch_size):
            rate = 0.5 * (1 + math.cos(math.pi * step / steps)) * how.lr
            for group in optimizer.param_groups:
                group["lr"] = rate
            gradient = _gradient(probes, data.rows(rows).to(how.device), data.labels[rows].to(how.device))
            for (w, b), dw, db in zip(each, gradient.weight.unbind(), gradient.bias.unbind(), strict=True):
                w.grad, b.grad = dw, db
            optimizer.step()
            step += 1
    return probes


def _gradient(probes: Probes, x: Tensor, y: Tensor) -> Probes:
    """Return the gradient of every layer's mean cross-entropy."""
    error = probes.logits(x).softmax(dim=-1)
    # The gradient of softmax with cross-entropy, without a graph for P layers at once.
    error[torch.arange(len(y), device=y.device), :, y] -= 1
    error /= len(y)
    return Probes((error.flatten(1).T @ x).view_as(probes.weight), error.sum(dim=0))


def best_classes(probes: Probes, data: Labelled, device: torch.device, k: int = 1, block: int = 4096) -> Tensor:
    """Return (P, n, k) int64; layers with logits that are not finite return class -1."""
    out = []
    for rows in torch.arange(len(data.labels)).split(block):
        logits = probes.logits(data.rows(rows).to(device))
        top_classes = torch.stack([rank_classes(one, k) for one in logits.unbind(dim=1)])
        # A diverged layer has no answer, instead of the first class for all.
        top_classes[~logits.isfinite().all(dim=2).T] = -1
        out.append(top_classes.cpu())
    return torch.cat(out, dim=1)


def search(train: Labelled, held_out: Labelled, classes: int, how: Training) -> tuple[float, dict[float, float]]:
    """Return the weight decay that is best on `held_out`, and all accuracies; ties keep the earlier one."""
    accuracies: dict[int, float] = {}

    def best_of(numbers: Sequence[int]) -> int:
        new = [i for i in dict.fromkeys(numbers) if i not in accuracies]
        if new:
            top_classes = best_classes(
                train_probes(train, classes, [DECAYS[i] for i in new], how), held_out, how.device
            )
            right = (top_classes[:, :, 0] == held_out.labels).double().mean(dim=1)
            accuracies.update(zip(new, right.tolist(), strict=True))
        # The earlier one of ties, as in a loop over them.
        return max(numbers, key=lambda i: (accuracies[i], -numbers.index(i)))

    peak = best_of(range(0, len(DECAYS), _COARSE))
    for step in _STEPS:
        peak = best_of([max(peak - step, 0), peak, min(peak + step, len(DECAYS) - 1)])
    return DECAYS[peak], {DECAYS[i]: accuracy for i, accuracy in sorted(accuracies.items())}


def few_shots(labels: Tensor, k: int, seed: int) -> Tensor:
    """Return numbers of k samples per class, in a random order by `seed`. Raises `DataError` if a class has fewer."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # Stable sort of a random order: the first k of each class are a random sample.
    by_class = labels[order].sort(stable=True)
    counts = torch.bincount(labels)
    poor = ((counts > 0) & (counts < k)).nonzero().flatten()
    if len(poor):
        raise DataError(f"fewshot_k={k}: class {int(poor[0])} has {int(counts[poor[0]])} training images")
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[by_class.values]
    return order[by_class.indices[place < k].sort().values]


def score(
    train: Labelled,
    test: Labelled,
    classes: int,
    how: Training,
    held_out: Labelled | None,
    fewshot_k: int = -1,
    decay: float = 0.0,
) -> Result:
    """Train and score with the weight decay selected on `held_out` if given (then trained on both, unless few-shot), otherwise with `decay`."""
    tried: dict[float, float] = {}
    if fewshot_k > 0:
        train = train.only(few_shots(train.labels, fewshot_k, how.seed))
    if held_out is not None:
        decay, tried = search(train, held_out, classes, how)
        # Few-shot training excludes the held-out images.
        train = train if fewshot_k > 0 else train.with_more(held_out)
    probes = train_probes(train, classes, [decay], how)
    top_classes = best_classes(probes, test, how.device, min(5, classes))[0]
    result = result_from_ranking(top_classes, test.labels, classes, "probe")
    options = {
        "optimizer": "AdamW on weight and bias", "lr": how.lr, "epochs": how.epochs, "batch_size": how.batch_size,
        "seed": how.seed, "weight_decay": decay, "tried": {f"{d:.3g}": a for d, a in tried.items()}, "fewshot_k": fewshot_k,
    }  # fmt: skip
    return result._replace(options=options)
