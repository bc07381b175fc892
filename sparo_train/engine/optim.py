"""AdamW with two decay groups, and the learning-rate schedules."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch.distributed.tensor import DTensor

from ..core.config import Frozen
from ..core.contracts import Objective
from ..core.errors import ConfigError


class OptimConfig(Frozen):
    """Defaults are open_clip's for ViTs."""

    lr: float = Field(default=5e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.2, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    clip_grad_norm: float | None = Field(default=None, gt=0)  # global norm; the paper's runs do not clip
    max_skipped: int = Field(default=20, ge=0)  # non-finite steps in a row before training stops


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of 0-based `step`: lr*(step+1)/warmup, then cosine to `min_lr` (open_clip's formula), or constant."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * (config.lr - config.min_lr)


def build_adamw(config: OptimConfig, objective: Objective) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: those in `objective.no_decay()` without weight decay, the rest with it."""
    undecayed = set(objective.no_decay())
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, p in objective.named_parameters():
        if p.requires_grad:  # the fused kernel does not take shards and whole tensors in one group
            groups.setdefault((name not in undecayed, isinstance(p, DTensor)), []).append(p)
    if not groups:
        raise ConfigError("objective: no parameter is trainable")
    return torch.optim.AdamW(
        [{"params": groups[key], "weight_decay": config.weight_decay if key[0] else 0.0} for key in sorted(groups)],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
