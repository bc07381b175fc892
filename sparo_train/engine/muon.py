"""Muon for matrices and AdamW for other parameters (Jordan et al. 2024), as one optimizer for the engines.

torch computes an update in 16 bits, so engines agree less closely than with AdamW: after six steps they differ by up to
0.06 (ddp) or 0.15 (fsdp2, which sums over shards) of the distance that a matrix moved. Resumed runs are still
bit-identical.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..core.config import field
from ..core.errors import ConfigError
from .optim import AdamWConfig, Optimizer

_MATRIX = 1  # role of the parameters that Muon steps

# Embeddings and queries by the names that they have in every model. Readouts list their own (`adamw_only_parameters`). Patterns are never
# removed here, because stored recipes contain them.
_ADAMW = (
    "*embedding*", "*pos_embed", "*cls_token", "*q_emb", "*.query", "*.latent", "*.space_dict", "*sparo.k.*", "*sparo.v.*", "*attpool.k.*",
    "*attpool.v.*", "*last_layer*",
)  # fmt: skip


class MuonConfig(AdamWConfig):
    """torch.optim.Muon for matrices and AdamW for other parameters.

    Muon's update is scaled to the size of AdamW's (Liu et al. 2025), so both share `optim.lr` and `optim.weight_decay`.
    """

    engines: ClassVar[tuple[str, ...] | None] = ("local", "ddp", "fsdp2")
    skips_non_finite: ClassVar[bool] = False  # torch's Muon has no such switch

    kind: Literal["muon"] = field("muon", "Kind of the optimizer: an entry of sparo.optimizers.")  # type: ignore[assignment]
    momentum: float = field(0.95, "Nesterov momentum of the gradients of matrices.", ge=0, lt=1)
    ns_steps: int = field(5, "Newton-Schulz iterations that orthogonalize an update.", ge=1, lt=100)
    adamw_patterns: tuple[str, ...] = field(
        _ADAMW,
        "Name patterns of matrices that are updated by AdamW, not by Muon. AdamW always updates matrices that a "
        "module of the model lists in adamw_only_parameters, and all parameters that are not matrices (biases, "
        "norms, logit_scale, patch convolutions).",
    )

    def parameter_role(self, name: str, parameter: nn.Parameter, adamw_only: Collection[str]) -> int:
        # Muon does not treat a convolution's kernel as a matrix.
        is_map = parameter.ndim == 2 and name not in adamw_only
        return _MATRIX if is_map and not any(fnmatchcase(name, pattern) for pattern in self.adamw_patterns) else 0

    def group_state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["role"] == _MATRIX else self.state_names

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        matrices = [group for group in groups if group["role"] == _MATRIX]
        if not matrices:
            raise ConfigError(
                "optim.kind=muon: Muon trains matrices only, but no matrix is left for Muon, because optim.adamw_patterns and the "
                "model assign the trained matrices to AdamW. Set optim.kind=adamw, or change optim.adamw_patterns."
            )
        muon = torch.optim.Muon(
            matrices,
            lr=self.lr,
            momentum=self.momentum,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",  # so that both use one learning rate and one weight decay
        )
        return CombinedOptimizer(super().build([group for group in groups if group["role"] != _MATRIX]), muon)


class CombinedOptimizer:
    """Two optimizers as one: concatenated groups, one mapping of state, one step after the other."""

    def __init__(self, *inner: Any):
        self.inner = inner
        self.state = inner[0].state
        for other in inner[1:]:
            other.state = self.state  # keyed by parameter, so the two never collide

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups themselves, so that changes apply to the optimizers."""
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none=set_to_none)
