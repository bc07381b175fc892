"""Transport of tokens to slots by Sinkhorn's algorithm, with its gradient in closed form; plans of less entropy; exact plans.

Costs are (b, K, N), slots by tokens. Tokens give `a` (b, N) and slots take `b` (b, K), both of one sum. All in log space. What is
kept for the gradient is the costs and K + N numbers per step, where autograd keeps two maps (K, N) per step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 1e-20  # MESH's clamp: below it a share has no entropy


class TransportPlan(NamedTuple):
    """moved: (b, K, N), its sums over tokens are `b` exactly, those over slots `a` nearly.  v: (b, K, 1), to start again from."""

    moved: Tensor
    v: Tensor


def sinkhorn(cost: Tensor, log_a: Tensor, log_b: Tensor, steps: int, v: Tensor | None = None) -> TransportPlan:
    """`steps` times tokens, then slots (Cuturi 2013), of exp(-cost); as many steps backwards for the gradient of `moved`."""
    start = torch.zeros_like(log_b)[..., None] if v is None else v.detach()
    moved, last = _Sinkhorn.apply(cost, log_a[:, None], log_b[..., None], start, steps)  # type: ignore[misc]
    return TransportPlan(moved, last)


def sinkhorn_unrolled(cost: Tensor, log_a: Tensor, log_b: Tensor, steps: int, v: Tensor | None = None) -> TransportPlan:
    """The same in torch's own operations, which have gradients of gradients."""
    a, b = log_a[:, None], log_b[..., None]
    # Tokens first, then slots: the last half step's sums are exact, and slots are what is read.
    u, v = a, torch.zeros_like(b) if v is None else v
    for _ in range(steps):
        u = a - (v - cost).logsumexp(1, keepdim=True)
        v = b - (u - cost).logsumexp(2, keepdim=True)
    return TransportPlan((u + v - cost).exp(), v)


class _Track(NamedTuple):
    """Potentials of every step: u[t] (b, 1, N) and v[t] (b, K, 1); v[0] is what it began from."""

    u: list[Tensor]
    v: list[Tensor]


def _walk(cost: Tensor, a: Tensor, b: Tensor, v: Tensor, steps: int) -> _Track:
    track = _Track([], [v])
    for _ in range(steps):
        track.u.append(a - (track.v[-1] - cost).logsumexp(1, keepdim=True))
        track.v.append(b - (track.u[-1] - cost).logsumexp(2, keepdim=True))
    return track


def _back(cost: Tensor, a: Tensor, b: Tensor, track: _Track, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From d/d(log moved) to the gradients of cost, log a and log b: every half step is a softmax that is built again."""
    of_cost, of_a, of_b = outer.clone(), torch.zeros_like(a), torch.zeros_like(b)
    of_u, of_v = outer.sum(1, keepdim=True), outer.sum(2, keepdim=True)
    for u, before, after in zip(reversed(track.u), reversed(track.v[:-1]), reversed(track.v[1:]), strict=True):
        of_b += of_v
        taken = (u + (after - b) - cost).exp_().mul_(of_v)
        of_cost -= taken
        # Through slots' half step, then through tokens', in the opposite order of the walk.
        of_u = of_u - taken.sum(1, keepdim=True)
        of_a += of_u
        given = (before + (u - a) - cost).exp_().mul_(of_u)
        of_cost -= given
        of_v, of_u = -given.sum(2, keepdim=True), torch.zeros_like(of_u)
    return of_cost.neg_(), of_a, of_b


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cost: Tensor, a: Tensor, b: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        track = _walk(cost, a, b, v, steps)
        ctx.steps = steps
        ctx.save_for_backward(cost, a, b, *track.u, *track.v)
        last = track.v[-1].clone()  # what is saved may not be an output, too
        ctx.mark_non_differentiable(last)
        return (track.u[-1] + last - cost).exp(), last

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cost, a, b, *rest = ctx.saved_tensors
        track = _Track(rest[: ctx.steps], rest[ctx.steps :])
        moved = (track.u[-1] + track.v[-1] - cost).exp_()
        return *_back(cost, a, b, track, outer[0] * moved), None, None


class Similar(NamedTuple):
    """weight: lambda of Eq. 9.  slots: S (b, K, K), columns of sum one.  first: the plan of the first costs, (b, K, N)."""

    weight: float
    slots: Tensor
    first: Tensor


def less_entropy(
    cost: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    steps: int,
    rounds: int,
    rate: Tensor | float,
    similar: Similar | None = None,
    unrolled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Costs whose plan has less entropy: `rounds` steps of length `rate` down its gradient (Zhang et al. 2022, Eq. 9-11).

    Args:
        cost: (b, K, N), with noise that breaks ties.  similar: the regulariser.
        unrolled: the steps carry a gradient themselves, as the paper's text has it; else they are constants, as in its code.

    Returns:
        costs (b, K, N), and `v` to start the last plan from.
    """
    v = None
    for _ in range(rounds):
        if unrolled and cost.requires_grad and torch.is_grad_enabled():
            found, v = sinkhorn_unrolled(cost, log_a, log_b, steps, v)
            (slope,) = torch.autograd.grad(_height(found, similar), cost, create_graph=True)
        else:
            with torch.no_grad():
                slope, v = _slope(cost, log_a, log_b, steps, v, similar)
        # Of a length that does not depend on how flat entropy is: the rate is one for all images.
        length = slope.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-12)
        cost = cost - rate * slope / length
    return cost, v


def _height(moved: Tensor, similar: Similar | None) -> Tensor:
    """Entropy, mean over pairs, sum over the batch."""
    held = moved.clamp(_TINY, 1)
    height = -(held * held.log()).mean((1, 2)).sum()
    if similar is not None:
        height = height + similar.weight * (similar.slots.transpose(1, 2) @ moved - similar.first).square().sum()
    return height


def _slope(
    cost: Tensor, log_a: Tensor, log_b: Tensor, steps: int, v: Tensor | None, similar: Similar | None
) -> tuple[Tensor, Tensor]:
    a, b = log_a[:, None], log_b[..., None]
    track = _walk(cost, a, b, torch.zeros_like(b) if v is None else v, steps)
    log_moved = track.u[-1] + track.v[-1] - cost
    moved = log_moved.exp()
    inside = (moved >= _TINY) & (moved <= 1)
    outer = torch.where(inside, -(log_moved + 1) * moved, 0) / (cost.shape[1] * cost.shape[2])
    if similar is not None:
        apart = similar.slots.transpose(1, 2) @ moved - similar.first
        outer = outer + 2 * similar.weight * (similar.slots @ apart) * moved
    return _back(cost, a, b, track, outer)[0], track.v[-1]


@torch.library.custom_op("sparo::exact_plan", mutates_args=())
def exact_plan(cost: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """The plan of least cost, (b, K, N), by POT's network simplex in fp64, one sample after the other; it has no gradient."""
    import ot  # an extra, `transport`

    costs, a, b = (x.double().cpu().numpy() for x in (cost, log_a.exp(), log_b.exp()))
    if not all(np.isfinite(x).all() for x in (costs, a, b)):
        return torch.full_like(cost, torch.nan)  # a step that the loop leaves out
    a = a * (b.sum(1) / a.sum(1))[:, None]  # one sum to the last bit, or the simplex finds no plan
    plans = [ot.emd(give, take, np.ascontiguousarray(c.T)).T for give, take, c in zip(a, b, costs, strict=True)]
    return torch.from_numpy(np.stack(plans)).to(cost)


@exact_plan.register_fake
def _(cost: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    return torch.empty_like(cost)


def log_marginal(scores: Tensor, total: int) -> Tensor:
    """Scores (b, n) to log shares of `total`."""
    return F.log_softmax(scores, dim=-1) + float(np.log(total))
