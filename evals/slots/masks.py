"""Masks of image encodings, trained on pairs of captions (SPARO paper, Section 5.2 and Appendix C.1).

m = sigmoid(s/4 theta), s = max(100, exp(alpha)); the cosines of the masked image with the true and the false caption, times s, are
the logits of a cross-entropy. All texts have one norm, so with d_i = y_i * (p_i - n_i) and q_i = y_i^2, summed within the parts of a
mask, a pair's loss is softplus(-s * d.m / sqrt(q.m^2)): two matrices hold all that training needs of images and captions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .margins import Margins


class Factors(NamedTuple):
    """Of n pairs and P parts: `d`, `q` (n, P) fp32; `kinds` (n,) int64 decide the standard score (macro)."""

    d: Tensor
    q: Tensor
    kinds: Tensor

    def only(self, rows: Tensor) -> Factors:
        return Factors(*(t[rows] for t in self))


def factors(
    image: Tensor, true: Tensor, false: Tensor, kinds: Tensor, granularity: Literal["unit", "dimension"]
) -> Factors:
    """From encodings (n, U, V) of images and captions; a part is a unit, or every single number."""
    d, q = image * (true - false), image.square()
    # Summed before training: a mask of units needs no number of theirs apart.
    if granularity == "unit":
        return Factors(d.sum(-1), q.sum(-1), kinds)
    return Factors(d.flatten(1), q.flatten(1), kinds)


class MaskTraining(NamedTuple):
    """How a mask is trained; what the paper leaves open has a default here.

    clamp: `max` is the paper's formula, s >= 100; `min` is CLIP's own clamp, s <= 100, of which `max` may be a slip.
    alpha: at the start; ln(1/0.07) is CLIP's.  theta starts at 0, a mask of halves everywhere, which ranks as no mask does.
    batch: pairs per step; None: all of them.  best: keep the epoch with the best standard score, as the paper does, else the last.
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
    """SGD on `train_factors`. The same seed gives the same mask."""
    theta = torch.zeros(train_factors.d.shape[1], requires_grad=True)
    alpha = torch.tensor(how.alpha, requires_grad=True)
    optimizer = torch.optim.SGD([theta, alpha], lr=how.lr, momentum=how.momentum)
    generator = torch.Generator().manual_seed(how.seed)
    n, size = len(train_factors.d), how.batch or len(train_factors.d)
    mask = mask_of(theta, alpha, how.clamp).detach()
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
        mask = mask_of(theta, alpha, how.clamp).detach()
        curve.append(accuracy(train_factors, mask))
        # The first of equal epochs: later ones only drift.
        if not how.best or curve[-1] > max(curve[:-1]):
            best = (mask, epoch)
    return TrainedMask(*best, curve, losses, n)


def loss(d: Tensor, q: Tensor, theta: Tensor, alpha: Tensor, clamp: str) -> Tensor:
    """Mean cross-entropy of pairs, in the factored form."""
    m = mask_of(theta, alpha, clamp)
    # A mask that closes everything has no direction; without the floor its gradient would be NaN.
    cosine = (d @ m) / (q @ m.square()).clamp(min=1e-24).sqrt()
    return F.softplus(-_scale(alpha, clamp) * cosine).mean()


def mask_of(theta: Tensor, alpha: Tensor, clamp: str) -> Tensor:
    """sigmoid(s/4 theta)."""
    return torch.sigmoid(_scale(alpha, clamp) / 4 * theta)


def _scale(alpha: Tensor, clamp: str) -> Tensor:
    return alpha.exp().clamp(min=100) if clamp == "max" else alpha.exp().clamp(max=100)


def accuracy(pair_factors: Factors, mask: Tensor) -> float:
    """The standard score: the mean over kinds of the share of pairs whose true caption wins; ties lose."""
    right = (pair_factors.d @ mask > 0).double()
    of = torch.bincount(pair_factors.kinds)
    return float((torch.bincount(pair_factors.kinds, weights=right) / of.clamp(min=1))[of > 0].mean())


def masked_margins(margins: Margins, mask: Tensor) -> Tensor:
    """(n,) bool: right answers behind a mask (U,), where a mask per unit is folded into the shares."""
    return margins.right(torch.einsum("nuk,u->nk", margins.values, mask) + margins.fixed)
