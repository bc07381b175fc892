"""Muon for matrices, AdamW for the rest (Jordan et al. 2024), as one optimizer to the engines.

torch computes an update in 16 bits, so engines do not agree to the last digits as they do with AdamW: behind six steps to six hundredths
of what a matrix moved (ddp), or to fifteen (fsdp2, which adds up over shards). A run that is resumed is bit-equal all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..core.config import Frozen, field

# What is a table or a query by the names that it has everywhere. Read-outs list their own (`adamw_only_parameters`); those that stand here stay,
# because a run's record of its recipe has them.
_ADAMW = (
    "*embedding*", "*pos_embed", "*cls_token", "*q_emb", "*.query", "*.latent", "*.space_dict", "*sparo.k.*", "*sparo.v.*", "*attpool.k.*",
    "*attpool.v.*", "*last_layer*",
)  # fmt: skip


class MuonConfig(Frozen):
    """torch.optim.Muon, its update scaled to the size of AdamW's (Liu et al. 2025), so that both take `optim.lr` and `optim.weight_decay`."""

    momentum: float = field(0.95, "of the gradient, Nesterov's", ge=0, lt=1)
    ns_steps: int = field(5, "Newton-Schulz iterations that make an update orthogonal", ge=1, lt=100)
    adamw_patterns: tuple[str, ...] = field(
        _ADAMW,
        "patterns of matrices that stay with AdamW, beside those that a model lists itself and all that is no matrix (biases, norms, "
        "logit_scale, patch convolutions)",
    )


def uses_muon(config: MuonConfig | None, name: str, p: nn.Parameter, listed: Collection[str]) -> bool:
    """Whether Muon steps a parameter of this name; `listed`: those that the model leaves to AdamW."""
    if config is None or name in listed:
        return False
    # A convolution's kernel is no matrix to Muon: its rows are no inputs.
    return p.ndim == 2 and not any(fnmatchcase(name, pattern) for pattern in config.adamw_patterns)


def muon(config: MuonConfig, groups: Sequence[Mapping[str, Any]], lr: float) -> torch.optim.Muon:
    """Muon over groups of matrices."""
    return torch.optim.Muon(
        [dict(group) for group in groups],
        lr=lr,
        momentum=config.momentum,
        ns_steps=config.ns_steps,
        # So that one rate and one decay do for both.
        adjust_lr_fn="match_rms_adamw",
    )


def entries_of(optimizer: torch.optim.Optimizer | CombinedOptimizer) -> dict[int, frozenset[str]]:
    """What an optimizer keeps of each of its parameters, by their id."""
    entries_by_param: dict[int, frozenset[str]] = {}
    for inner in optimizer.inner if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        entries = frozenset(
            {"momentum_buffer"} if isinstance(inner, torch.optim.Muon) else {"step", "exp_avg", "exp_avg_sq"}
        )
        entries_by_param |= {id(p): entries for group in inner.param_groups for p in group["params"]}
    return entries_by_param


class CombinedOptimizer:
    """Two optimizers as one: their groups in a row, one mapping of state, steps one after the other."""

    def __init__(self, *inner: torch.optim.Optimizer):
        self.inner = inner
        self.state = inner[0].state
        for other in inner[1:]:
            other.state = self.state  # keyed by parameter: no two of them hold the same

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups themselves: what is written to them counts."""
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none=set_to_none)
