"""Statistics of DINO's encodings and targets, and what counts as a collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .dino_config import CollapseConfig

_EARLY = 0.05  # share of a run in which encodings may have a low rank, as those of a new network do


class LastBatch(NamedTuple):
    """The teacher's outputs for the last batch, and the share of the run that was done."""

    encodings: Tensor
    targets: Tensor
    done: float


def slow_metrics(last: LastBatch) -> dict[str, float | Tensor]:
    """Return statistics of a batch, for log steps."""
    return {
        "feature_std": spread(last.encodings),
        "rankme": rankme(last.encodings),
        "prototypes_used": prototypes_used(last.targets),
        "done": last.done,
    }


def collapse_message(limits: CollapseConfig, out_dim: int, facts: Mapping[str, float]) -> str | None:
    """Return a message if metrics of a step are outside of the limits, otherwise None."""
    most = math.log(out_dim)
    entropy, kl = facts["teacher_entropy"] / most, facts["teacher_kl"] / most
    low, high = limits.entropy
    rank = facts.get("rankme", math.inf) if facts.get("done", 0.0) > _EARLY else math.inf
    problems = (
        [] if low <= entropy <= high else [f"teacher entropy {entropy:.4f} of log(out_dim), outside {low}..{high}"]
    )
    problems += [] if kl >= limits.kl else [f"KL {kl:.5f} of log(out_dim), below {limits.kl}"]
    problems += [] if rank >= limits.rankme else [f"effective rank {rank:.2f} of the encodings, below {limits.rankme}"]
    if not problems:
        return None
    return (
        f"the representation collapses: {'; '.join(problems)} (objective.collapse). A lower optim.lr, a lower "
        "objective.teacher_temp (uniform outputs) or a higher one (one-hot), a larger batch, or a clip_grad_norm help"
    )


@torch.no_grad()
def rankme(x: Tensor, rows: int = 128) -> Tensor:
    """Return the effective rank of encodings (B, D), 0-d: exp of the entropy of the singular values' shares (Garrido et al. 2023, Eq. 1).

    Args:
        x: encodings; the first `rows` of them are used.
        rows: upper limit of the result and of its cost.
    """
    # Singular values by the products of rows, in fp64, because their roots double the number of wrong digits. On the CPU,
    # which is as fast for matrices of this size.
    x = x[:rows].cpu().double()
    x = x if len(x) < x.shape[1] else x.T
    shares = torch.linalg.eigvalsh(x @ x.T).clamp(min=0).sqrt()
    shares = shares / shares.sum().clamp(min=1e-12) + 1e-7
    return torch.exp(-(shares * shares.log()).sum())


@torch.no_grad()
def spread(x: Tensor) -> Tensor:
    """Return the standard deviation of normalised encodings (B, D), times sqrt(D), 0-d: 1 if they fill all directions, 0 if all are equal."""
    x = F.normalize(x.float(), dim=-1)
    return x.std(0, correction=0).mean() * x.shape[1] ** 0.5


@torch.no_grad()
def prototypes_used(targets: Tensor) -> Tensor:
    """Return exp of the entropy of the mean target (N, K), 0-d: the number of prototypes among which a batch is distributed."""
    mean = targets.mean(0)
    return torch.exp(-torch.xlogy(mean, mean).sum())
