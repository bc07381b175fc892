"""Attention by optimal transport: Sinkhorn's algorithm with a closed-form backward, and assignment of tokens to slots with it (Zhang et al. 2023)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError
from sparo_train.core.first_order import first_order
from sparo_train.models.precision import at_least_fp32

from .sparse_transport import l2_plan, sliced_plan
from .transport_config import TransportConfig

_TINY = 1e-20  # MESH's clamp: smaller values have no entropy


class TransportPlan(NamedTuple):
    """Transport plan (b, K, N), whose sums over tokens equal `b` exactly and whose sums over slots equal `a` approximately; v: (b, K, 1), a warm start."""

    plan: Tensor
    v: Tensor


def sinkhorn(cost: Tensor, log_a: Tensor, log_b: Tensor, steps: int, v: Tensor | None = None) -> TransportPlan:
    """Run `steps` Sinkhorn iterations, tokens then slots (Cuturi 2013), on exp(-cost); gradients reach all inputs, `v` included."""
    v = torch.zeros_like(log_b)[..., None] if v is None else v
    return TransportPlan(*_Sinkhorn.apply(cost, log_a[:, None], log_b[..., None], v, steps))  # type: ignore[misc]


def sinkhorn_unrolled(cost: Tensor, log_a: Tensor, log_b: Tensor, steps: int, v: Tensor | None = None) -> TransportPlan:
    """Compute the same in torch's own operations, which support second derivatives."""
    a, b = log_a[:, None], log_b[..., None]
    # Tokens first, then slots: the sums of the last half step are exact, and slots are the output.
    u, v = a, torch.zeros_like(b) if v is None else v
    for _ in range(steps):
        u = a - (v - cost).logsumexp(1, keepdim=True)
        v = b - (u - cost).logsumexp(2, keepdim=True)
    return TransportPlan((u + v - cost).exp(), v)


class _Potentials(NamedTuple):
    """Potentials of every step: u[t] (b, 1, N) and v[t] (b, K, 1); v[0] is the initial value."""

    u: list[Tensor]
    v: list[Tensor]


def _run_sinkhorn(cost: Tensor, a: Tensor, b: Tensor, v: Tensor, steps: int) -> _Potentials:
    potentials = _Potentials([], [v])
    for _ in range(steps):
        potentials.u.append(a - (potentials.v[-1] - cost).logsumexp(1, keepdim=True))
        potentials.v.append(b - (potentials.u[-1] - cost).logsumexp(2, keepdim=True))
    return potentials


class _Gradients(NamedTuple):
    """Gradients of cost (b, K, N), log_a (b, 1, N), log_b (b, K, 1) and the initial v (b, K, 1)."""

    cost: Tensor
    log_a: Tensor
    log_b: Tensor
    v: Tensor


def _backward(
    cost: Tensor, a: Tensor, b: Tensor, potentials: _Potentials, grad_log_plan: Tensor, grad_v: Tensor | None = None
) -> _Gradients:
    """Backpropagate from log(plan) and the final v through all half steps; each half step is a softmax, recomputed here.

    Args:
        grad_log_plan: (b, K, N), or zeros of a shape that broadcasts to it.
        grad_v: gradient of the final `v`, beyond its part in the plan.
    """
    grad_cost = grad_log_plan.expand_as(cost).clone()
    grad_a, grad_b = torch.zeros_like(a), torch.zeros_like(b)
    grad_u, grad_last = grad_cost.sum(1, keepdim=True), grad_cost.sum(2, keepdim=True)
    grad_v = grad_last if grad_v is None else grad_last + grad_v
    for u, before, after in zip(
        reversed(potentials.u), reversed(potentials.v[:-1]), reversed(potentials.v[1:]), strict=True
    ):
        grad_b += grad_v
        slot_step_grad = (u + (after - b) - cost).exp_().mul_(grad_v)
        grad_cost -= slot_step_grad
        # Reverse order of the forward: the slots' half step first, then the tokens'.
        grad_u = grad_u - slot_step_grad.sum(1, keepdim=True)
        grad_a += grad_u
        token_step_grad = (before + (u - a) - cost).exp_().mul_(grad_u)
        grad_cost -= token_step_grad
        grad_v, grad_u = -token_step_grad.sum(2, keepdim=True), torch.zeros_like(grad_u)
    return _Gradients(grad_cost.neg_(), grad_a, grad_b, grad_v)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cost: Tensor, a: Tensor, b: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        potentials = _run_sinkhorn(cost, a, b, v, steps)
        ctx.steps = steps
        ctx.save_for_backward(cost, a, b, *potentials.u, *potentials.v)
        last = potentials.v[-1].clone()  # a saved tensor cannot also be an output
        return (potentials.u[-1] + last - cost).exp(), last

    @staticmethod
    @first_order
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cost, a, b, *rest = ctx.saved_tensors
        potentials = _Potentials(rest[: ctx.steps], rest[ctx.steps :])
        plan = (potentials.u[-1] + potentials.v[-1] - cost).exp_()
        return *_backward(cost, a, b, potentials, outer[0] * plan, outer[1]), None


class _EntropyGradient(torch.autograd.Function):
    """Direction of steepest entropy, a constant, and the warm start `v` of the next Sinkhorn run, which carries a gradient."""

    @staticmethod
    def forward(
        ctx: Any, cost: Tensor, a: Tensor, b: Tensor, v: Tensor, steps: int, regularizer: SimilarityRegularizer | None
    ) -> tuple[Tensor, Tensor]:
        potentials = _run_sinkhorn(cost, a, b, v, steps)
        entropy_grad = _entropy_gradient(cost, a, b, potentials, regularizer)
        ctx.steps = steps
        ctx.save_for_backward(cost, a, b, *potentials.u, *potentials.v)
        ctx.mark_non_differentiable(entropy_grad)
        return entropy_grad, potentials.v[-1].clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cost, a, b, *rest = ctx.saved_tensors
        potentials = _Potentials(rest[: ctx.steps], rest[ctx.steps :])
        return *_backward(cost, a, b, potentials, cost.new_zeros(()), outer[1]), None, None


class SimilarityRegularizer(NamedTuple):
    """Regularizer with weight lambda (Eq. 9), slot similarities S (b, K, K) with columns of sum one, and the plan of the first costs, (b, K, N)."""

    weight: float
    slots: Tensor
    first: Tensor


def minimize_entropy(
    cost: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    steps: int,
    rounds: int,
    rate: Tensor | float,
    regularizer: SimilarityRegularizer | None = None,
    unrolled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Lower the entropy of the plan by `rounds` normalized gradient steps of length `rate` on the costs (Zhang et al. 2022, Eq. 9-11).

    Args:
        cost: (b, K, N), with noise that breaks ties.
        log_a, log_b, steps, rounds, rate: marginals and schedule.
        regularizer: the regularizer, or None.
        unrolled: differentiate through the steps, as in the paper's text; otherwise they are constants, as in
            davzha/MESH.

    Returns:
        Costs (b, K, N), and the warm start `v` of the final Sinkhorn run. As in davzha/MESH, `v` keeps its graph
        through all rounds.
    """
    a, b = log_a[:, None], log_b[..., None]
    v: Tensor | None = None
    for _ in range(rounds):
        if unrolled and cost.requires_grad and torch.is_grad_enabled():
            plan, v = sinkhorn_unrolled(cost, log_a, log_b, steps, v)
            (entropy_grad,) = torch.autograd.grad(_entropy(plan, regularizer), cost, create_graph=True)
        else:
            entropy_grad, v = _EntropyGradient.apply(
                cost, a, b, torch.zeros_like(b) if v is None else v, steps, regularizer
            )  # type: ignore[misc]
        # Normalized per image, so that one rate fits all images, however flat their entropy is.
        length = entropy_grad.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-12)
        cost = cost - rate * entropy_grad / length
    return cost, v


def _entropy(plan: Tensor, regularizer: SimilarityRegularizer | None) -> Tensor:
    """Return the entropy, averaged over pairs and summed over the batch."""
    clamped_plan = plan.clamp(_TINY, 1)
    entropy = -(clamped_plan * clamped_plan.log()).mean((1, 2)).sum()
    if regularizer is not None:
        entropy = (
            entropy + regularizer.weight * (regularizer.slots.transpose(1, 2) @ plan - regularizer.first).square().sum()
        )
    return entropy


def _entropy_gradient(
    cost: Tensor, a: Tensor, b: Tensor, potentials: _Potentials, regularizer: SimilarityRegularizer | None
) -> Tensor:
    log_plan = potentials.u[-1] + potentials.v[-1] - cost
    plan = log_plan.exp()
    inside = (plan >= _TINY) & (plan <= 1)
    outer = torch.where(inside, -(log_plan + 1) * plan, 0) / (cost.shape[1] * cost.shape[2])
    if regularizer is not None:
        residual = regularizer.slots.transpose(1, 2) @ plan - regularizer.first
        outer = outer + 2 * regularizer.weight * (regularizer.slots @ residual) * plan
    return _backward(cost, a, b, potentials, outer).cost


@torch.library.custom_op("sparo::exact_plan", mutates_args=())
def exact_plan(cost: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the plan of least cost, (b, K, N), by POT's network simplex in fp64, sample by sample; it has no gradient."""
    import ot  # the extra `transport`

    costs, a, b = (x.double().cpu().numpy() for x in (cost, log_a.exp(), log_b.exp()))
    if not all(np.isfinite(x).all() for x in (costs, a, b)):
        return torch.full_like(cost, torch.nan)  # a step that the loop will skip
    a = a * (b.sum(1) / a.sum(1))[:, None]  # both sums must be equal to the last bit, or the simplex fails
    plans = [
        ot.emd(token_mass, slot_mass, np.ascontiguousarray(c.T)).T
        for token_mass, slot_mass, c in zip(a, b, costs, strict=True)
    ]
    return torch.from_numpy(np.stack(plans)).to(cost)


@exact_plan.register_fake
def _(cost: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    return torch.empty_like(cost)


def log_marginal(scores: Tensor, total: int) -> Tensor:
    """Convert scores (b, n) to log weights with sum `total`."""
    return F.log_softmax(scores, dim=-1) + float(np.log(total))


class TransportInputs(NamedTuple):
    """Inputs from tokens for all iterations: keys (b, N, d), log marginal (b, N), noise to break ties (b, K, N)."""

    keys: Tensor
    log_a: Tensor
    tie_noise: Tensor


class Transport(nn.Module):
    """Assignment of tokens to slots by transport plans.

    Args:
        config: options.
        in_width: width of tokens.
        width: width of slots.

    Raises:
        ConfigError: exact plans are requested, and POT is not installed.
    """

    def __init__(self, config: TransportConfig, in_width: int, width: int):
        super().__init__()
        self.config = config
        if config.exact in ("sum", "straight_through") and find_spec("ot") is None:
            raise ConfigError(
                f"grouping.transport.exact={config.exact}: needs POT. Run `pip install -e '.[transport]'` in sparo's checkout."
            )
        self.input_marginal = _score_layer(in_width, config.hidden)
        if config.slot_marginal == "learned":
            self.slot_marginal = _score_layer(width, config.hidden)
        if config.learn_rate:
            self.rate = nn.Parameter(torch.tensor(config.entropy_rate))
        if config.regulariser:
            self.likeness = _score_layer(2 * width, config.hidden)

    def forward(self, queries: Tensor, normed: Tensor, token_inputs: TransportInputs) -> Tensor:
        """Return the weight of each token for each slot, (b, K, N) in fp32 at least, for queries (b, K, d) of slots (b, K, D)."""
        c = self.config
        # Linear layers run like the rest of the model, whose weights may be bf16.
        slot_scores = self.slot_marginal(normed)[..., 0] if c.slot_marginal == "learned" else None
        similarity = self._slot_similarity(normed) if c.regulariser else None
        with torch.autocast(queries.device.type, enabled=False):  # exponentials of small differences
            queries, keys, log_a = (
                at_least_fp32(queries),
                at_least_fp32(token_inputs.keys),
                at_least_fp32(token_inputs.log_a),
            )
            cost = costs(c, queries, keys)
            count = cost.shape[1]
            log_b = torch.zeros_like(cost[:, :, 0])
            if slot_scores is not None:
                log_b = log_marginal(at_least_fp32(slot_scores), count)
            if c.regularization == "l2":
                return l2_plan(cost, log_a.exp(), log_b.exp(), c.l2_weight, c.steps)
            if not c.entropy_steps:
                plan = sinkhorn(cost, log_a, log_b, c.steps).plan
                if c.exact == "none":
                    return plan
                if c.exact == "sliced":
                    return plan + sliced_plan(queries, keys, log_a.exp(), log_b.exp())
                best = exact_plan(cost.detach(), log_a.detach(), log_b.detach())
                return plan + best if c.exact == "sum" else plan + (best - plan).detach()
            regularizer = None
            if similarity is not None:
                regularizer = SimilarityRegularizer(
                    c.regulariser, similarity, sinkhorn(cost, log_a, log_b, c.steps).plan
                )
            rate = self.rate if c.learn_rate else c.entropy_rate
            cost = cost + c.noise * at_least_fp32(token_inputs.tie_noise)
            cost, v = minimize_entropy(cost, log_a, log_b, c.steps, c.entropy_steps, rate, regularizer, c.second_order)
            return sinkhorn(cost, log_a, log_b, c.steps, v).plan

    def _slot_similarity(self, slots: Tensor) -> Tensor:
        count = slots.shape[1]
        pairs = torch.cat([slots[:, :, None].expand(-1, -1, count, -1), slots[:, None].expand(-1, count, -1, -1)], -1)
        return F.softmax(at_least_fp32(self.likeness(pairs)[..., 0]), dim=1)

    def prepare_inputs(self, keys: Tensor, tokens: Tensor, tie_noise: Tensor, slots: int) -> TransportInputs:
        """Prepare what all iterations of an image share; the marginals of tokens sum to the number of slots."""
        return TransportInputs(keys, log_marginal(at_least_fp32(self.input_marginal(tokens)[..., 0]), slots), tie_noise)


def costs(c: TransportConfig, queries: Tensor, keys: Tensor) -> Tensor:
    """Return costs (b, K, N) for (b, K, d) and (b, N, d)."""
    if c.cost == "cdist":
        return c.cost_scale * torch.cdist(queries, keys)
    if c.cost == "cosine":
        return -c.cost_scale * F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).transpose(1, 2)
    long = queries.square().sum(-1)[..., None] + keys.square().sum(-1)[:, None]
    return c.cost_scale * (long - 2 * queries @ keys.transpose(1, 2))


def _score_layer(width: int, hidden: int | None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden or width), nn.ReLU(), nn.Linear(hidden or width, 1))
