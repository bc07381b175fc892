"""Auxiliary losses that make the slots of an encoding independent of each other (future work of the SPARO paper, Sec. 6).

For L slots of V values, all pairs l != m count alike:

    attention    cosine of the attention maps of two slots, per image or text
    covariance   V * |C_lm|^2, squared cross-covariances over the batch, as in VICReg (Bardes et al. 2022)
    hsic         |C_lm|^2 / (|C_ll| |C_mm|), HSIC with linear kernels (Gretton et al. 2005), normalized to 0..1

C_lm (V, V) is the covariance of slots l and m over the global batch, and |.| the Frobenius norm. `hsic` does not change
with the scale of the slots, so shrinking their variance does not reduce it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.config import Frozen, field
from ..core.distributed import Ring, sum_over_ranks


class IndependenceConfig(Frozen):
    """Auxiliary loss for the independence of slots, the mean of the image tower's and the text tower's."""

    kind: Literal["attention", "covariance", "hsic"] = field(
        "hsic",
        "Dependence that is penalized, as a mean over pairs of slots. attention: cosine of their attention maps. covariance: squared "
        "cross-covariances of their values over the batch (VICReg). hsic: as covariance, but divided by the slots' own covariances.",
    )
    weight: float = field(1.0, "Factor of this loss, which is added to the contrastive loss.", gt=0)


def attention_overlap(attention: Tensor) -> Tensor:
    """Return the mean cosine (B,) of the attention maps (B, L, N) of two slots, in fp32 at least."""
    maps = F.normalize(attention.to(torch.promote_types(attention.dtype, torch.float32)), dim=-1)
    count = maps.shape[1]
    # The sum over all pairs is the squared norm of the sum, so no (L, L) table is needed; every map has norm one.
    return (maps.sum(1).square().sum(-1) - count) / (count * (count - 1))


def slot_dependence(encodings: Tensor, slots: int, kind: Literal["covariance", "hsic"]) -> Tensor:
    """Return the dependence of slots over the global batch, a scalar.

    Gradients reach the encodings of all ranks, as in the contrastive loss: the mean of the ranks' gradients is that of
    this value.

    Args:
        encodings: (b, L * V) of this rank, slot after slot, in fp32.
        slots: L.
        kind: see the module.
    """
    values = encodings.unflatten(1, (slots, -1))
    # Unit norm on average, whatever the weights of slots within an encoding.
    values = values * slots**0.5
    samples = len(values) * Ring().size
    flat = values.flatten(1)
    centered = flat - sum_over_ranks(flat.sum(0)) / samples
    covariance = sum_over_ranks(centered.T @ centered) / samples
    width = values.shape[2]
    # |C_lm|^2 for all pairs, (L, L).
    squared = covariance.view(slots, width, slots, width).square().sum((1, 3))
    if kind == "covariance":
        dependence = width * squared
    else:
        own = squared.diagonal().clamp(min=1e-12).sqrt()
        dependence = squared / (own[:, None] * own)
    return (dependence.sum() - dependence.diagonal().sum()) / (slots * (slots - 1))
