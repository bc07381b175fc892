"""Attention by transport: how much a slot takes of every token, so that none goes empty (Zhang et al. 2022, Section 3)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError
from sparo_train.models.precision import at_least_fp32

from .transport import SimilarityRegularizer, exact_plan, log_marginal, minimize_entropy, sinkhorn
from .transport_config import TransportConfig


class TransportInputs(NamedTuple):
    """What tokens bring to all rounds: keys (b, N, d), log marginal (b, N), tie_noise (b, K, N) that noise breaks."""

    keys: Tensor
    log_a: Tensor
    tie_noise: Tensor


class Transport(nn.Module):
    """Plans of transport.

    Args:
        in_width: of tokens.  width: of slots.

    Raises:
        ConfigError: exact plans are asked for, and POT is not installed.
    """

    def __init__(self, config: TransportConfig, in_width: int, width: int):
        super().__init__()
        self.config = config
        if config.exact != "none" and find_spec("ot") is None:
            raise ConfigError(
                f"grouping.transport.exact={config.exact}: needs POT; pip install -e '.[transport]' in sparo's checkout"
            )
        self.gives = _scored(in_width, config.hidden)
        if config.slot_marginal == "learned":
            self.takes = _scored(width, config.hidden)
        if config.learn_rate:
            self.rate = nn.Parameter(torch.tensor(config.entropy_rate))
        if config.regulariser:
            self.likeness = _scored(2 * width, config.hidden)

    def forward(self, queries: Tensor, normed: Tensor, token_inputs: TransportInputs) -> Tensor:
        """Queries (b, K, d) of slots (b, K, D) to how much each takes of the tokens, (b, K, N) in fp32 at least."""
        c = self.config
        # Linear layers run as the rest of the model does, whose weights an engine may hold in bf16.
        slot_scores = self.takes(normed)[..., 0] if c.slot_marginal == "learned" else None
        similarity = self._slot_similarity(normed) if c.regulariser else None
        with torch.autocast(queries.device.type, enabled=False):  # exponents of small differences
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
            if not c.entropy_steps:
                plan = sinkhorn(cost, log_a, log_b, c.steps).plan
                if c.exact == "none":
                    return plan
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
        """What all rounds of an image share; tokens' marginals sum to the number of slots."""
        return TransportInputs(keys, log_marginal(at_least_fp32(self.gives(tokens)[..., 0]), slots), tie_noise)


def costs(c: TransportConfig, queries: Tensor, keys: Tensor) -> Tensor:
    """(b, K, d), (b, N, d) to (b, K, N)."""
    if c.cost == "cdist":
        return c.cost_scale * torch.cdist(queries, keys)
    if c.cost == "cosine":
        return -c.cost_scale * F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).transpose(1, 2)
    long = queries.square().sum(-1)[..., None] + keys.square().sum(-1)[:, None]
    return c.cost_scale * (long - 2 * queries @ keys.transpose(1, 2))


def _scored(width: int, hidden: int | None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden or width), nn.ReLU(), nn.Linear(hidden or width, 1))
