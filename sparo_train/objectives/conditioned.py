"""FLAIR's loss (Xiao et al., CVPR 2025): every text of the global batch pools every image, and a sigmoid tells its own image apart.

    -1/B sum_ij log sigmoid(t_ij (scale * <v_ij, y_j> + bias)),  v_ij the image i as seen by text j, of norm one; t_ij as in SigLIP

A rank has its own images and all texts, so that its share of the loss is exact; texts are taken in tiles whose pooling is computed
again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..core.ring import Ring
from ..models.readouts.flair import pooled_by_text

_HELD = 1 << 26  # numbers of pooled images that a tile holds


def conditioned_scores(patches: Tensor, texts: Tensor, own: Sequence[Tensor], heads: int) -> Tensor:
    """Cosines of texts (T, D) of unit norm with images (B, N, D of projected patches) as they pool them, (B, T)."""
    size = max(1, _HELD // (len(patches) * patches.shape[-1]))

    # Everything it reads is an argument: what is captured would be kept by every checkpoint.
    def tile(some: Tensor, patches: Tensor, *own: Tensor) -> Tensor:
        seen = F.normalize(pooled_by_text(own, heads, patches, some), dim=-1)
        return torch.einsum("btd,td->bt", seen, some)

    if len(texts) <= size:
        return tile(texts, patches, *own)
    parts = [checkpoint(tile, some, patches, *own, use_reentrant=False) for some in texts.split(size)]
    return torch.cat([part for part in parts if isinstance(part, Tensor)], dim=1)


def conditioned_sigmoid(
    patches: Tensor,
    text: Tensor,
    own: Sequence[Tensor],
    heads: int,
    scale: Tensor,
    bias: Tensor,
    ring: Ring | None = None,
) -> Tensor:
    """This rank's share of the loss times the number of ranks.

    Args:
        patches: (b, N, D) of this rank's images, projected.  text: (b, D) of unit norm.
        own: values of the pool's parameters.
    """
    ring = ring or Ring()
    logits = scale * conditioned_scores(patches, ring.gather(text), own, heads) + bias
    at = torch.arange(len(text), device=text.device)
    sign = torch.full_like(logits, -1.0)
    # This rank's pairs lie behind those of the ranks before it.
    sign[at, at + ring.rank * len(text)] = 1.0
    return -F.logsigmoid(sign * logits).sum() / len(text)
