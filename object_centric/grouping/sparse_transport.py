"""Transport plans that Zhang et al. (2022, Sec. 4) tried besides Sinkhorn's and the exact one: L2-regularized and sliced."""

from __future__ import annotations

import torch
from torch import Tensor


def l2_plan(cost: Tensor, a: Tensor, b: Tensor, weight: float, steps: int) -> Tensor:
    """Return the plan of least `<cost, plan> + weight / 2 * |plan|^2` (Blondel et al. 2018), which has exact zeros.

    The plan is `[u + v - cost]_+ / weight`. Steps compute u of all tokens and v of all slots in turn, as Sinkhorn's
    algorithm does for entropy; gradients pass through all of them.

    Args:
        cost: (B, K, N).
        a, b: marginals (B, N) of tokens and (B, K) of slots, with equal sums.
        weight: of the regularization.
        steps: number of steps; the sums of the last half step, over tokens, are exact.
    """
    v = torch.zeros_like(b)[..., None]
    u = torch.zeros_like(a)[:, None]
    for _ in range(steps):
        u = _level(v - cost, weight * a[:, None], 1)
        v = _level(u - cost, weight * b[..., None], 2)
    return (u + v - cost).clamp(min=0) / weight


def _level(x: Tensor, mass: Tensor, dim: int) -> Tensor:
    """Return t with `sum [x + t]_+ = mass` along a dimension, by sorting, as for a projection to the simplex."""
    falling, _ = x.sort(dim=dim, descending=True)
    shape = [1] * x.ndim
    shape[dim] = -1
    count = torch.arange(1, x.shape[dim] + 1, device=x.device, dtype=x.dtype).view(shape)
    levels = (mass - falling.cumsum(dim)) / count
    # The largest number of entries that are all positive at their own level; there is always one, as mass is positive.
    support = (falling + levels > 0).sum(dim, keepdim=True).clamp(min=1)
    return levels.gather(dim, support - 1)


@torch.no_grad()
def sliced_plan(queries: Tensor, keys: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of the optimal plans along every coordinate of queries and keys (Bonneel et al. 2015), (B, K, N).

    Along one coordinate, sorted slots receive sorted tokens. Sorting breaks ties, but has no gradient.

    Args:
        queries: (B, K, d).
        keys: (B, N, d).
        a, b: marginals (B, N) of tokens and (B, K) of slots, with equal sums.
    """
    total = torch.zeros(*b.shape, a.shape[1], dtype=a.dtype, device=a.device)
    for coordinate in range(queries.shape[-1]):
        slots, tokens = (x[..., coordinate].argsort(stable=True) for x in (queries, keys))
        # Ends of the sorted masses on a line; a slot receives the tokens that overlap it.
        slot_ends, token_ends = (mass.gather(1, order).cumsum(1) for mass, order in ((b, slots), (a, tokens)))
        slot_starts, token_starts = slot_ends - b.gather(1, slots), token_ends - a.gather(1, tokens)
        ends = torch.minimum(slot_ends[..., None], token_ends[:, None])
        starts = torch.maximum(slot_starts[..., None], token_starts[:, None])
        overlap = (ends - starts).clamp(min=0)
        # From sorted to original order: rows by slots, columns by tokens.
        rows, columns = slots.argsort(-1), tokens.argsort(-1)
        overlap = overlap.gather(1, rows[..., None].expand_as(overlap))
        total += overlap.gather(2, columns[:, None].expand_as(overlap))
    return total / queries.shape[-1]
