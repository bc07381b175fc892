"""clip-benchmark's linear probe, which is the SPARO paper's: all weight decays at once, for one or several labels per image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import RandomSampler

from sparo_train.core.errors import DataError

from .result import Result
from .zeroshot import average_precisions, multilabel_result, rank_classes, result_from_ranking

DECAYS = np.logspace(-6, 2, num=97).tolist()
_COARSE, _STEPS = 16, (8, 4, 2, 1)


class Labelled(NamedTuple):
    """Features by number: `rows` (m,) int64 -> (m, D) fp32, and labels (n,) int64, or (n, C) of zeros and ones."""

    rows: Callable[[Tensor], Tensor]
    labels: Tensor

    def select(self, numbers: Tensor) -> Labelled:
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
    """Return the gradient of every layer's mean cross-entropy (several labels: of its sum over binary ones)."""
    # The gradients of cross-entropies, without a graph for P layers at once.
    if y.ndim == 2:
        error = probes.logits(x).sigmoid() - y[:, None]
    else:
        error = probes.logits(x).softmax(dim=-1)
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


def class_scores(probes: Probes, data: Labelled, device: torch.device, block: int = 4096) -> Tensor:
    """Return logits (n, P, C) on the CPU."""
    numbers = torch.arange(len(data.labels)).split(block)
    return torch.cat([probes.logits(data.rows(rows).to(device)).cpu() for rows in numbers])


def _qualities(probes: Probes, data: Labelled, device: torch.device) -> list[float]:
    """Return each layer's accuracy, or its mean average precision for several labels per image."""
    if data.labels.ndim == 1:
        top_classes = best_classes(probes, data, device)
        return (top_classes[:, :, 0] == data.labels).double().mean(dim=1).tolist()
    scores = class_scores(probes, data, device).nan_to_num(-1e30)
    return [average_precisions(one, data.labels).mean().item() for one in scores.unbind(dim=1)]


def search(train: Labelled, held_out: Labelled, classes: int, how: Training) -> tuple[float, dict[float, float]]:
    """Return the weight decay that is best on `held_out`, and all its accuracies (or mean average precisions); ties keep the earlier one."""
    accuracies: dict[int, float] = {}

    def best_of(numbers: Sequence[int]) -> int:
        new = [i for i in dict.fromkeys(numbers) if i not in accuracies]
        if new:
            probes = train_probes(train, classes, [DECAYS[i] for i in new], how)
            accuracies.update(zip(new, _qualities(probes, held_out, how.device), strict=True))
        # The earlier one of ties, as in a loop over them.
        return max(numbers, key=lambda i: (accuracies[i], -numbers.index(i)))

    peak = best_of(range(0, len(DECAYS), _COARSE))
    for step in _STEPS:
        peak = best_of([max(peak - step, 0), peak, min(peak + step, len(DECAYS) - 1)])
    return DECAYS[peak], {DECAYS[i]: accuracy for i, accuracy in sorted(accuracies.items())}


def draw_few_shots(labels: Tensor, k: int, seed: int, names: Sequence[str] = ()) -> Tensor:
    """Return numbers of k samples per class, in a random order by `seed`. Raises `DataError` if a class, called by its name or number, has fewer."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # Stable sort of a random order: the first k of each class are a random sample.
    by_class = labels[order].sort(stable=True)
    counts = torch.bincount(labels)
    poor = ((counts > 0) & (counts < k)).nonzero().flatten()
    if len(poor):
        first = int(poor[0])
        name = names[first] if first < len(names) else first
        raise DataError(
            f"fewshot_k={k}: class {name} has {int(counts[first])} training images, not counting those held out by val_proportion. "
            "Lower fewshot_k or val_proportion."
        )
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
    repeats: int = 1,
    names: Sequence[str] = (),
) -> Result:
    """Train and score with the weight decay selected on `held_out` if given (then trained on both, unless few-shot), otherwise with `decay`.

    With `repeats` above 1, few-shot training is repeated with other images, by the seeds that follow `how.seed`; the
    weight decay is selected once. `names` of classes are for errors.
    """
    tried: dict[float, float] = {}
    first = train.select(draw_few_shots(train.labels, fewshot_k, how.seed, names)) if fewshot_k > 0 else train
    if held_out is not None:
        decay, tried = search(first, held_out, classes, how)
    whole = train if held_out is None else train.with_more(held_out)
    results, chosen = [], whole
    for seed in range(how.seed, how.seed + repeats):
        if fewshot_k > 0:  # training excludes the held-out images
            chosen = train.select(draw_few_shots(train.labels, fewshot_k, seed))
        results.append(_score_once(chosen, test, classes, how._replace(seed=seed), decay))
    steps = how.epochs * -(-len(chosen.labels) // how.batch_size)
    options = {
        "optimizer": "AdamW on weight and bias", "lr": how.lr, "epochs": how.epochs, "batch_size": how.batch_size, "steps": steps,
        "seed": how.seed, "weight_decay": decay, "tried": {f"{d:.3g}": a for d, a in tried.items()}, "fewshot_k": fewshot_k,
        "repeats": repeats,
    }  # fmt: skip
    return _average(results)._replace(options=options)


def _score_once(train: Labelled, test: Labelled, classes: int, how: Training, decay: float) -> Result:
    probes = train_probes(train, classes, [decay], how)
    if test.labels.ndim == 2:
        return multilabel_result(class_scores(probes, test, how.device)[:, 0], test.labels, "probe", only_present=True)
    top_classes = best_classes(probes, test, how.device, min(5, classes))[0]
    return result_from_ranking(top_classes, test.labels, classes, "probe")


def _average(results: Sequence[Result]) -> Result:
    """Return the mean over repeated trainings with its 95 % t-interval, which contains the choice of training images only."""
    if len(results) == 1:
        return results[0]
    values = {name: np.array([result.metrics[name] for result in results]) for name in results[0].metrics}
    half = {name: stats.t.ppf(0.975, len(v) - 1) * v.std(ddof=1) / len(v) ** 0.5 for name, v in values.items()}
    metrics = {name: float(v.mean()) for name, v in values.items()}
    intervals = {name: (max(0.0, m - half[name]), min(1.0, m + half[name])) for name, m in metrics.items()}
    shares = np.mean([result.predictions["right"] for result in results], axis=0, dtype=np.float32)
    predictions = {"acc1": shares, "label": results[0].predictions["label"]}
    return results[0]._replace(metrics=metrics, intervals=intervals, predictions=predictions)
