"""Margins of units: by how much each unit prefers the right answer to the wrong ones.

An answer is right if the sum of the margins over the units in use is positive against every wrong answer. Ties are
decided as in `sparo eval` (the lower class; for captions the false one).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..tasks.clusters import share_interval
from ..tasks.result import DRAWS, percentiles, wilson
from ..tasks.zeroshot import rank_classes

Average = Literal["macro", "micro"]
CANDIDATES = 50  # wrong classes of an image that are kept for searches: those that the whole encoding ranks highest


class Margins(NamedTuple):
    """Margins of n questions with U units and K wrong answers each.

    Attributes:
        values: (n, U, K) fp32.
        fixed: (n, K), the part that no unit changes.
        tie: (n, K) bool, True if a tie counts as right.
        kinds: (n,) int64, over which accuracy is averaged; all zero for a plain average.
        keys: image of each question.
    """

    values: Tensor
    fixed: Tensor
    tie: Tensor
    kinds: Tensor
    keys: Sequence[str]

    @property
    def questions(self) -> int:
        """Return n; not `len`, which a named tuple defines already."""
        return len(self.values)

    @property
    def units(self) -> int:
        """Return U."""
        return self.values.shape[1]

    def select(self, rows: Tensor) -> Margins:
        """Return some of the questions, by number or by a mask."""
        numbers = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        keys = [self.keys[int(i)] for i in numbers]
        return Margins(self.values[numbers], self.fixed[numbers], self.tie[numbers], self.kinds[numbers], keys)

    @property
    def weight(self) -> Tensor:
        """Return (n,) fp64 weights that sum to one: equal over kinds, and equal within a kind."""
        of = torch.bincount(self.kinds)
        # A half may lack a kind; the others share its weight.
        return 1.0 / ((of > 0).sum() * of)[self.kinds].double()

    def right_answers(self, total: Tensor) -> Tensor:
        """Return right answers (n, …) bool from sums of margins (n, K, …), including the fixed part."""
        # One comparison instead of three: at least zero is the same as above the number next to zero.
        zero = torch.where(self.tie, torch.nextafter(torch.tensor(0.0), torch.tensor(-1.0)), torch.tensor(0.0))
        correct = total > zero[(...,) + (None,) * (total.dim() - 2)]
        return correct[:, 0] if correct.shape[1] == 1 else correct.all(dim=1)

    def accuracy(self, right: Tensor) -> Tensor:
        """Return accuracies (…) fp64 of (n, …) bool: the mean over kinds, as in the tasks."""
        of = torch.bincount(self.kinds)
        # A product instead of a loop over kinds, because (n, …) may contain a curve for every order.
        member = torch.zeros(len(of), len(self.kinds), dtype=torch.float64)
        member[self.kinds, torch.arange(len(self.kinds))] = 1
        counts = torch.tensordot(member[of > 0], right.double(), dims=1)
        share = counts / of[of > 0].double()[(...,) + (None,) * (counts.dim() - 1)]
        return share.sum(0) / len(share)


def pair_margins(
    image: Tensor,
    true: Tensor,
    false: Tensor,
    kinds: Sequence[str],
    keys: Sequence[str],
    average: Average,
    rest: int = 0,
) -> Margins:
    """Return the margins of true and false captions.

    Args:
        image: (n, U + rest, d).
        true, false: (n, U, d) or (n, 1, d).
    """
    share = (image * (true - false)).sum(-1)
    names = list(dict.fromkeys(kinds))
    table = torch.tensor([names.index(kind) if average == "macro" else 0 for kind in kinds])
    return _margins(share[..., None], rest, torch.zeros(len(share), 1, dtype=torch.bool), table, keys)


def class_margins(
    images: Iterable[Tensor],
    weights: Tensor,
    labels: Tensor,
    keys: Sequence[str],
    rest: int = 0,
    keep: int = CANDIDATES,
) -> Margins:
    """Return the margins of classes: the label against the `keep` other classes that the whole encoding ranks highest.

    With at most `keep` + 1 classes nothing is dropped; otherwise an accuracy is over these candidates, and slightly too
    high.

    Args:
        images: (b, U + rest, d) in blocks.
        weights: (C, U, d) or (C, 1, d).
        labels: (n,) int64.
    """
    parts, ties, first = [], [], 0
    for block in images:
        label = labels[first : first + len(block)]
        first += len(block)
        logits = unit_logits(block, weights)  # (U, b, C)
        # The right answer is not among the wrong ones.
        total = logits.sum(0).scatter(1, label[:, None], -torch.inf)
        wrong = rank_classes(total, min(keep, total.shape[1] - 1))
        of = torch.arange(len(block))[:, None]
        right = logits[:, torch.arange(len(block)), label]
        parts.append((right[:, :, None] - logits[:, of, wrong]).transpose(0, 1))
        ties.append(label[:, None] < wrong)  # a tie goes to the lower class
    kinds = torch.zeros(len(labels), dtype=torch.int64)
    return _margins(torch.cat(parts), rest, torch.cat(ties), kinds, keys)


def _margins(share: Tensor, rest: int, tie: Tensor, kinds: Tensor, keys: Sequence[str]) -> Margins:
    units = share.shape[1] - rest
    return Margins(share[:, :units].contiguous(), share[:, units:].sum(1), tie, kinds, list(keys))


def unit_logits(block: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Return each unit's part of the logits, (U, b, C), for images (b, U, d) and class vectors (C, U, d) or (C, 1, d)."""
    if weights.shape[1] == 1:
        return torch.matmul(block.transpose(0, 1), weights[:, 0].T, out=out)
    return torch.bmm(block.transpose(0, 1), weights.permute(1, 2, 0), out=out)


def renormalize(weights: Tensor) -> Tensor:
    """Scale every unit of class vectors (C, U, d) to one norm.

    The mean over prompts shortens a slot in which prompts disagree; `classifier_slots: renorm` undoes that.
    """
    return F.normalize(weights, dim=-1) * weights.shape[1] ** -0.5


class EachUnit(NamedTuple):
    """Right answers (n, U) with each unit alone and without each unit, and (n,) with all, from one pass over the images."""

    single_unit: Tensor
    without: Tensor
    whole: Tensor


def each_unit(images: Iterable[Tensor], weights: Tensor, labels: Tensor, rest: int = 0) -> EachUnit:
    """Compute zero-shot answers with each unit alone, without it, and with all, in one pass; equal to one masked pass per unit.

    Args:
        images: (b, U + rest, d) in blocks.
        weights: (C, U, d) or (C, 1, d).
        labels: (n,) int64.
    """
    single_unit, without, whole = [], [], []
    for logits, truth in _logits(images, weights, labels):
        total, own = logits.sum(0), logits[: len(logits) - rest]
        whole.append(_argmax(total) == truth)
        single_unit.append((_argmax(own) == truth).T)
        # In place, because the next images overwrite `own` anyway.
        without.append((_argmax(torch.sub(total, own, out=own)) == truth).T)
    return EachUnit(torch.cat(single_unit), torch.cat(without), torch.cat(whole))


def class_curves(
    images: Iterable[Tensor], weights: Tensor, labels: Tensor, orders: Sequence[Sequence[int]], rest: int = 0
) -> Tensor:
    """Return right answers (O, n, U) over all classes with the first 1, 2, … U units of each of O orders."""
    curves = []
    for logits, truth in _logits(images, weights, labels):
        table, answer = logits.numpy(), truth.numpy()
        right = np.empty((len(orders), len(answer), table.shape[0] - rest), bool)
        # Start with the part that no unit changes.
        fixed = table[table.shape[0] - rest :].sum(0)
        for o, order in enumerate(orders):
            total = fixed.copy()
            for k, unit in enumerate(order):
                # numpy, because a second thread gains nothing for so few values and loses much if other programs use
                # the cores.
                np.add(total, table[unit], out=total)
                right[o, :, k] = total.argmax(-1) == answer
        curves.append(torch.from_numpy(right))
    return torch.cat(curves, dim=1)


_ROWS = (
    64  # images whose logits of all units are stored at once: 16 MB for 64 units and 1,000 classes, which fits caches
)


def _logits(images: Iterable[Tensor], weights: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits (U + rest, b, C) of a few images at a time, overwritten by the next ones, and their labels."""
    first, buffer = 0, torch.empty(0)
    for block in images:
        label = labels[first : first + len(block)]
        first += len(block)
        for rows, truth in zip(block.split(_ROWS), label.split(_ROWS), strict=True):
            shape = (rows.shape[1], len(rows), len(weights))
            buffer = buffer if buffer.shape == shape else torch.empty(shape)  # new pages cost as much as the product
            yield unit_logits(rows, weights, buffer), truth


def _argmax(logits: Tensor) -> Tensor:
    """Return argmax over the last dimension, the first of ties; numpy's is five times as fast as torch's on a CPU."""
    return torch.from_numpy(logits.numpy().argmax(-1))


def interval(right: Tensor, kinds: Tensor, clusters: np.ndarray | None = None) -> tuple[float, float]:
    """Return a 95 % interval of an accuracy: Wilson's, with several kinds a bootstrap within each, and over clusters if questions share images.

    Args:
        right: (n,) bool.
        kinds: (n,) int64, over which accuracy is averaged.
        clusters: (n,) int64, of questions that share images. Default: none share one.
    """
    if clusters is not None:
        return share_interval(right.numpy(), kinds.numpy(), clusters)
    of = torch.bincount(kinds)
    if len(of) == 1:
        return wilson(float(right.double().mean()), len(right))
    rng = np.random.default_rng(0)
    draws = []
    for kind, count in enumerate(of.tolist()):
        if count:
            # Within kinds, because a mean over kinds weighs small ones like large ones.
            draws.append(rng.binomial(count, float(right[kinds == kind].double().mean()), DRAWS) / count)
    return percentiles(np.mean(draws, axis=0))
