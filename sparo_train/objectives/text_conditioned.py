"""FLAIR's loss (Xiao et al., CVPR 2025): every text of the global batch pools the patches of every image, scored by a sigmoid loss.

    -1/B sum_ij log sigmoid(t_ij (scale * <v_ij, y_j / |y_j|> + bias)),  v_ij: image i pooled by text j, unit norm; t_ij
    as in SigLIP

The query y_j is the projected text embedding before normalization, as in the official model: the LayerNorm of queries
has an epsilon, so a unit-norm text would give another query. Each rank holds its own images and gathers all texts, so
its share of the loss is exact. Texts are processed in tiles, whose pooling is recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..core.distributed import Ring
from ..models.readouts.flair import pool_by_text

_TILE_ELEMENTS = 1 << 26  # elements of pooled images in one tile of texts


def conditioned_scores(patches: Tensor, queries: Tensor, pool: Sequence[Tensor], heads: int) -> Tensor:
    """Return the cosine of every text with every image as pooled by that text, (B, T).

    Args:
        patches: (B, N, D), projected patches of the images.
        queries: (T, D), projected text embeddings before normalization.
        pool: values of the pooling module's parameters, in order.
        heads: number of attention heads.
    """
    tile_size = max(1, _TILE_ELEMENTS // (len(patches) * patches.shape[-1]))

    # Pass all inputs as arguments, because every checkpoint would keep a captured tensor alive.
    def score_tile(queries: Tensor, patches: Tensor, *pool: Tensor) -> Tensor:
        pooled = F.normalize(pool_by_text(pool, heads, patches, queries), dim=-1)
        return torch.einsum("btd,td->bt", pooled, F.normalize(queries, dim=-1))

    if len(queries) <= tile_size:
        return score_tile(queries, patches, *pool)
    tiles = [checkpoint(score_tile, tile, patches, *pool, use_reentrant=False) for tile in queries.split(tile_size)]
    return torch.cat([tile for tile in tiles if isinstance(tile, Tensor)], dim=1)


def conditioned_sigmoid(
    patches: Tensor,
    queries: Tensor,
    pool: Sequence[Tensor],
    heads: int,
    scale: Tensor,
    bias: Tensor,
    ring: Ring | None = None,
) -> Tensor:
    """Return this rank's share of the loss, times the number of ranks.

    Args:
        patches: (b, N, D), projected patches of this rank's images.
        queries: (b, D), this rank's projected text embeddings before normalization.
        pool: values of the pooling module's parameters, in order.
        heads: number of attention heads.
        scale, bias: 0-d.
        ring: the ranks; default: those of the default process group.
    """
    ring = ring or Ring()
    logits = scale * conditioned_scores(patches, ring.gather(queries), pool, heads) + bias
    sign = torch.full_like(logits, -1.0)
    # The columns of this rank's texts follow those of the ranks before it.
    sign.diagonal(ring.rank * len(queries)).fill_(1.0)
    return -F.logsigmoid(sign * logits).sum() / len(queries)
