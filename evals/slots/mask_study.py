"""Masks of image encodings, trained on pairs of captions (SPARO paper, Sec. 4.3 and Table 5), and their scores on other tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..encoders.selection import Selection, SelectionData
from .eval_inputs import Classes, Pairs, halves
from .margins import Margins


class Factors(NamedTuple):
    """For n pairs and P parts: `d`, `q` (n, P) fp32; `kinds` (n,) int64 define the standard score (macro)."""

    d: Tensor
    q: Tensor
    kinds: Tensor

    def select(self, rows: Tensor) -> Factors:
        return Factors(*(t[rows] for t in self))


def factors(
    image: Tensor, true: Tensor, false: Tensor, kinds: Tensor, granularity: Literal["unit", "dimension"]
) -> Factors:
    """Return factors from encodings (n, U, V) of images and captions; a part is a unit, or a single value."""
    d, q = image * (true - false), image.square()
    # Sum before training, because a mask per unit does not need single values.
    if granularity == "unit":
        return Factors(d.sum(-1), q.sum(-1), kinds)
    return Factors(d.flatten(1), q.flatten(1), kinds)


class MaskTraining(NamedTuple):
    """Training of a mask; the paper leaves some of these open.

    Attributes:
        clamp: `max` is the paper's formula, s >= 100; `min` is CLIP's own clamp, s <= 100, where `max` may be a
            typo.
        alpha: initial value; ln(1/0.07) is CLIP's. theta starts at 0, which makes all mask values one half and does not
            change rankings.
        batch: pairs per step; None: all.
        best: keep the epoch with the best standard score, as in the paper; otherwise the last.
    """

    lr: float = 0.02
    momentum: float = 0.9
    epochs: int = 100
    clamp: Literal["max", "min"] = "max"
    alpha: float = 2.6592600369327783
    batch: int | None = 256
    best: bool = True
    seed: int = 0


class TrainedMask(NamedTuple):
    """`mask` (P,) in [0, 1], of epoch `epoch`, from `n` pairs; `curve`: the standard score before the first epoch and after each."""

    mask: Tensor
    epoch: int
    curve: list[float]
    losses: list[float]
    n: int


def train_mask(train_factors: Factors, how: MaskTraining = MaskTraining()) -> TrainedMask:
    """Train a mask with SGD on `train_factors`. The same seed gives the same mask."""
    theta = torch.zeros(train_factors.d.shape[1], requires_grad=True)
    alpha = torch.tensor(how.alpha, requires_grad=True)
    optimizer = torch.optim.SGD([theta, alpha], lr=how.lr, momentum=how.momentum)
    generator = torch.Generator().manual_seed(how.seed)
    n, size = len(train_factors.d), how.batch or len(train_factors.d)
    mask = compute_mask(theta, alpha, how.clamp).detach()
    curve, losses, best = [accuracy(train_factors, mask)], [], (mask, 0)
    for epoch in range(1, how.epochs + 1):
        total = 0.0
        for rows in torch.randperm(n, generator=generator).split(size) if size < n else [slice(None)]:
            optimizer.zero_grad()
            batch_loss = loss(train_factors.d[rows], train_factors.q[rows], theta, alpha, how.clamp)
            batch_loss.backward()
            optimizer.step()
            total += batch_loss.item() * len(train_factors.d[rows])
        losses.append(total / n)
        mask = compute_mask(theta, alpha, how.clamp).detach()
        curve.append(accuracy(train_factors, mask))
        # The first of equal epochs, because later ones only drift.
        if not how.best or curve[-1] > max(curve[:-1]):
            best = (mask, epoch)
    return TrainedMask(*best, curve, losses, n)


def loss(d: Tensor, q: Tensor, theta: Tensor, alpha: Tensor, clamp: str) -> Tensor:
    """Return the mean cross-entropy of pairs, in the factored form."""
    m = compute_mask(theta, alpha, clamp)
    # An all-zero mask has no direction; without the floor, its gradient would be NaN.
    cosine = (d @ m) / (q @ m.square()).clamp(min=1e-24).sqrt()
    return F.softplus(-_scale(alpha, clamp) * cosine).mean()


def compute_mask(theta: Tensor, alpha: Tensor, clamp: str) -> Tensor:
    """Return sigmoid(s/4 theta)."""
    return torch.sigmoid(_scale(alpha, clamp) / 4 * theta)


def _scale(alpha: Tensor, clamp: str) -> Tensor:
    return alpha.exp().clamp(min=100) if clamp == "max" else alpha.exp().clamp(max=100)


def accuracy(pair_factors: Factors, mask: Tensor) -> float:
    """Return the standard score: the mean over kinds of the share of pairs whose true caption wins; ties lose."""
    right = (pair_factors.d @ mask > 0).double()
    of = torch.bincount(pair_factors.kinds)
    return float((torch.bincount(pair_factors.kinds, weights=right) / of.clamp(min=1))[of > 0].mean())


def masked_margins(margins: Margins, mask: Tensor) -> Tensor:
    """Return (n,) bool: right answers with a mask (U,), where a mask per unit is applied to the margins."""
    return margins.right_answers(torch.einsum("nuk,u->nk", margins.values, mask) + margins.fixed)


Granularity = Literal["unit", "dimension"]


class MaskRow(NamedTuple):
    """A row of Table 5, over several training seeds.

    Attributes:
        parts: (number of parts, values in each).
        shape: of an encoding.
        pairs: standard score without a mask and with each seed's mask.
        held_out: on pairs that were not used in training.
        tasks: by name, accuracy without a mask and with each seed's mask.
    """

    label: str
    parts: tuple[int, int]
    shape: tuple[int, ...]
    held_out: bool
    pairs: tuple[float, list[float]]
    tasks: dict[str, tuple[float, list[float]]]


def relative_change(pairs: tuple[float, float], task: tuple[float, float]) -> float:
    """Return a task's relative change divided by that of the pairs, as in Table 5; NaN if the mask changed nothing on the pairs."""
    # Without a gain on the pairs, the ratio is undefined.
    gained = (pairs[1] - pairs[0]) / pairs[0] if pairs[0] else 0.0
    return float("nan") if gained == 0 or task[0] == 0 else (task[1] - task[0]) / task[0] / gained


def mask_row(
    label: str,
    pairs: Pairs,
    tasks: Mapping[str, Classes],
    per: Granularity,
    how: Sequence[MaskTraining],
    held_out: bool = False,
) -> tuple[MaskRow, list[TrainedMask]]:
    """Train a mask for each element of `how`, and score each on tasks by multiplying it into their classifiers."""
    train_factors = eval_factors = mask_factors(pairs, per)
    if held_out:
        # One half for all training seeds, so that their spread comes from training only.
        half = halves(label, pairs, how[0].seed)
        train_factors, eval_factors = train_factors.select(half), train_factors.select(~half)
    trained_masks = [train_mask(train_factors, one) for one in how]
    width = pairs.units.encoder.width
    ones = torch.ones(train_factors.d.shape[1])
    scores = {
        name: _fold_masks(task, [ones, *(one.mask for one in trained_masks)], width) for name, task in tasks.items()
    }
    number = len(ones)
    shape = (width,) if pairs.units.kind == "parts" else (pairs.units.number, width // pairs.units.number)
    row = MaskRow(
        label,
        (number, width // number),
        shape,
        held_out,
        (accuracy(eval_factors, ones), [accuracy(eval_factors, one.mask) for one in trained_masks]),
        {name: (values[0], values[1:]) for name, values in scores.items()},
    )
    return row, trained_masks


def mask_factors(pairs: Pairs, per: Granularity) -> Factors:
    """Return the inputs of mask training for pairs of captions."""
    u = pairs.units
    image = u.images(pairs.features.rows(pairs.owner))
    names = list(dict.fromkeys(pair.kind for pair in pairs.caption_pairs))
    # Micro: a single kind, whose mean is the mean over pairs.
    kinds = torch.tensor([names.index(pair.kind) if pairs.average == "macro" else 0 for pair in pairs.caption_pairs])
    return factors(image, u.texts(pairs.true), u.texts(pairs.false), kinds, per)


def _fold_masks(task: Classes, masks: Sequence[Tensor], width: int) -> list[float]:
    """Return accuracy with each mask: argmax_c <m*y, w_c> = argmax_c <y, m*w_c>, so images are not encoded again."""
    weights = task.weights.flatten(1)
    folded = [weights * mask.repeat_interleave(width // len(mask)) for mask in masks]
    right, first = [0] * len(masks), 0
    for rows in task.features.blocks():
        truth = task.labels[first : first + len(rows)]
        first += len(rows)
        for i, each in enumerate(folded):
            right[i] += int(((rows.float() @ each.T).argmax(-1) == truth).sum())
    return [count / max(1, len(task.labels)) for count in right]


def mask_selection(
    name: str, pairs: Pairs, trained: TrainedMask, per: Granularity, how: MaskTraining, held_out: bool
) -> Selection:
    """Return a mask in the form of a file for `--slots`; `selected_units` are the units with a mean mask value above one half."""
    units = pairs.units
    by_unit = trained.mask.view(units.number, -1).mean(1)
    # A file must select something; if all are below one half, it selects the largest.
    selected_units = (by_unit > 0.5).nonzero().flatten().tolist() or [int(by_unit.argmax())]
    order = by_unit.argsort(descending=True, stable=True).tolist()
    share = "half" if held_out else "all"
    return Selection(
        checkpoint=units.encoder.weights,
        label=units.encoder.label,
        units=units.kind,
        count=units.number,
        method=f"mask per {per}, clamp {how.clamp}, epoch {trained.epoch}",
        chosen=tuple(selected_units),
        order=tuple(order),
        scores=tuple(by_unit.tolist()),
        mask=tuple(trained.mask.tolist()),
        made_on=SelectionData(task=name, data=pairs.data, n=trained.n, share=share, seed=how.seed),
    )
