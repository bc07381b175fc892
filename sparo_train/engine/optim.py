"""AdamW with two decay groups, and the learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch.distributed.tensor import DTensor

from ..core.config import Frozen, between, free, setting
from ..core.contracts import Objective
from ..core.errors import ConfigError
from ..core.schedules import cosine, linear


class OptimConfig(Frozen):
    """Defaults are open_clip's for ViTs."""

    lr: float = setting(5e-4, "AdamW's rate at its highest", gt=0)
    betas: Annotated[tuple[float, float], between(0, 1 - 1e-9)] = setting((0.9, 0.98), "AdamW's two decays of moments")
    eps: float = setting(1e-6, "AdamW's, added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.2, "decoupled, of the parameters that the method decays", ge=0)
    weight_decay_end: float | None = setting(None, "a cosine from weight_decay to it, without warm-up (DINO)", ge=0)
    schedule: Literal["cosine", "constant"] = setting("cosine", "of the rate behind its warm-up")
    warmup_steps: int = setting(0, "steps of linear warm-up", ge=0)
    # open_clip's first step has lr/warmup_steps; DINO's has zero, and two steps have the whole rate at the end of the warm-up
    warmup_from_zero: bool = setting(
        False, "the first step has a rate of zero (DINO), not of lr/warmup_steps (open_clip)"
    )
    min_lr: float = setting(0.0, "where the cosine ends", ge=0)
    clip_grad_norm: float | None = setting(
        None, "largest norm of gradients; null: not clipped, as the paper's CLIP", gt=0
    )
    clip_per: Literal["global", "tensor"] = setting(
        "global", "the norm of all gradients, or of each parameter's (DINO)"
    )
    max_skipped: int = free(20, "non-finite steps in a row before training stops", ge=0)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of 0-based `step`: linear warm-up, then cosine to `min_lr`, or constant."""
    warm = config.warmup_steps
    if step < warm:
        return linear(0.0, config.lr, step, warm) if config.warmup_from_zero else config.lr * (step + 1) / warm
    if config.schedule == "constant":
        return config.lr
    return cosine(config.lr, config.min_lr, step - warm, total_steps - warm)


def weight_decay(config: OptimConfig, step: int, total_steps: int) -> float:
    """Weight decay of 0-based `step` for the parameters that are decayed."""
    end = config.weight_decay_end
    return config.weight_decay if end is None else cosine(config.weight_decay, end, step, total_steps)


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
        [
            {"params": groups[key], "decayed": key[0], "weight_decay": config.weight_decay if key[0] else 0.0}
            # In one order for all starts: checkpoints name parameters, but DeepSpeed cuts groups in their order.
            for key in sorted(groups)
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
