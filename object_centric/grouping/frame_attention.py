"""Inverted attention as an autograd function, one or a few key frames at a time.

All queries that compete for a frame's tokens are processed together, so the frame's weights are final at once and only
sums are kept. No table of all times' tokens by all times' slots is stored, unless it is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.first_order import first_order

AttentionScope = Literal["earlier", "all"]


class FrameAttention(torch.autograd.Function):
    """Attention with centred queries. Backward recomputes every frame's weights: R x N products per pair of times instead of storing them."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        offset: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        options: Any,
    ) -> Any:
        scope, softmax_scope, window, with_attention = options
        b, times, rows, wide = queries.shape
        # In fp32 at least, because the weights are summed over all times.
        weighted_sum, total = offset.new_zeros(b, times, rows, wide), torch.zeros_like(offset)
        attention = offset.new_zeros((b, times, rows, x.shape[2]) if with_attention else (0,))
        for keys in _chunks(queries, x, scope, window):
            frames, seen_by = keys.frames, keys.query_times
            key_tokens = x[:, frames].flatten(1, 2)
            raw = (queries[:, seen_by].flatten(1, 2) @ key_tokens.transpose(1, 2)).view(b, -1, rows, *keys.shape)
            shares = _attention_weights(raw, offset, rstd, bias, keys, softmax_scope)
            if with_attention:
                own = slice(frames.start - seen_by.start, frames.stop - seen_by.start)
                attention[:, frames] = shares[:, own].diagonal(dim1=1, dim2=3).movedim(-1, 1)
            if weight is not None:
                shares = shares * _factor(weight, keys)
            total[:, seen_by] += shares.flatten(3).sum(-1)
            # Scale the weights (R, N) by the deviation instead of the tokens (N, W).
            weights = shares.mul_(rstd[:, None, None, frames]).flatten(3).flatten(1, 2).to(x.dtype)
            weighted_sum[:, seen_by] += (weights @ key_tokens).view(b, -1, rows, wide)
        ctx.save_for_backward(queries, offset, x, mean, rstd, bias, weight)
        ctx.how = scope, softmax_scope, window
        ctx.mark_non_differentiable(attention)
        ctx.set_materialize_grads(False)  # no later use of x, so a table of zeros is avoided
        return weighted_sum, total, attention, x

    @staticmethod
    @first_order
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        d_weighted_sum: Tensor | None,
        d_total: Tensor | None,
        _attention: Tensor | None,
        d_next: Tensor | None,
    ) -> Any:
        saved = ctx.saved_tensors
        # If backward is called inside an autocast block, its products would have another precision than forward's.
        with torch.autocast(saved[0].device.type, enabled=False):
            return _gradients(saved, ctx.how, d_weighted_sum, d_total, d_next)


def _gradients(
    saved: Sequence[Tensor], options: Any, d_weighted_sum: Tensor | None, d_total: Tensor | None, d_next: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `FrameAttention`'s eight arguments, from the tensors that forward saved."""
    queries, offset, x, mean, rstd, bias, weight = saved
    scope, softmax_scope, window = options
    b, _, rows, wide = queries.shape
    if d_weighted_sum is None:
        d_weighted_sum = torch.zeros_like(queries, dtype=offset.dtype)
    if d_total is None:
        d_total = torch.zeros_like(offset)
    d_queries, d_offset = torch.zeros_like(d_weighted_sum), torch.zeros_like(offset)
    # The gradient of the later use of x belongs to this function: writing in place, all blocks need one table instead
    # of three.
    d_x = torch.zeros_like(x, memory_format=torch.contiguous_format) if d_next is None else d_next.contiguous()
    d_bias, d_weight = (None if table is None else torch.zeros_like(table) for table in (bias, weight))
    ones = x.new_ones(b, 1, wide)
    for keys in _chunks(queries, x, scope, window):
        frames, seen_by = keys.frames, keys.query_times
        key_tokens, d_key_tokens = x[:, frames].flatten(1, 2), d_x[:, frames].flatten(1, 2)
        r = rstd[:, None, None, frames]
        # Concatenated, because one larger product is faster than two.
        stacked_rows = torch.cat(
            [queries[:, seen_by].flatten(1, 2), d_weighted_sum[:, seen_by].to(x.dtype).flatten(1, 2), ones], 1
        )
        both = (stacked_rows[:, :-1] @ key_tokens.transpose(1, 2)).to(offset.dtype).view(b, 2, -1, rows, *keys.shape)
        raw, inner = both.unbind(1)
        shares = _attention_weights(raw, offset, rstd, bias, keys, softmax_scope)
        d_shares = (inner * r).add_(d_total[:, seen_by, :, None, None]).mul_(shares)
        if weight is not None and d_weight is not None:
            d_weight[seen_by, frames] += d_shares.sum((0, 4)).transpose(1, 2)
            d_shares = d_shares * _factor(weight, keys)
        # Softmax backward: weights * (gradient - its weighted mean), over all that compete for a token.
        competitor_sum = (
            d_shares.sum(2, keepdim=True) if softmax_scope == "time" else d_shares.sum((1, 2), keepdim=True)
        )
        d_logits = d_shares.addcmul_(shares, competitor_sum, value=-1)
        d_offset[:, seen_by] += d_logits.flatten(3).sum(-1)
        if d_bias is not None:
            d_bias[seen_by, frames] += d_logits.sum((0, 4)).transpose(1, 2)
        if weight is not None:
            shares = shares * _factor(weight, keys)
        # The gradient of x through its deviation, which all values of a token share: slope * (x - mean).
        both[:, 0], both[:, 1] = raw * d_logits, inner * shares
        # The derivative of rstd is its cube divided by the number of terms, times the centred values.
        slope = both.flatten(4).sum((1, 2, 3)) * rstd[:, frames].flatten(1) ** 3 / -wide
        both[:, 0], both[:, 1] = d_logits * r, shares * r
        rest = (slope * mean[:, frames].flatten(1)).neg_()[:, None].to(x.dtype)
        weights = torch.cat([both.flatten(4).flatten(1, 3).to(x.dtype), rest], 1)
        # The first half of the rows is the gradient of queries; the second, and `rest`, are for x only.
        d_queries[:, seen_by] += (weights[:, : raw.shape[1] * rows] @ key_tokens).view(b, -1, rows, wide)
        d_key_tokens.baddbmm_(weights.transpose(1, 2), stacked_rows)
        d_key_tokens.addcmul_(key_tokens, slope[..., None].to(x.dtype))
    return d_queries.to(queries.dtype), d_offset, d_x, None, None, d_bias, d_weight, None


class _Keys(NamedTuple):
    """Key frames that are processed together.

    Attributes:
        frames: the C frames.
        shape: (C, N).
        query_times: the t times that see at least one of them.
        hidden: (t, 1, C, 1), True where a time does not see a frame; None if each sees all.
    """

    frames: slice
    shape: tuple[int, int]
    query_times: slice
    hidden: Tensor | None


# Largest table of logits, in values: 64 MiB in fp32.
_GPU_TABLE = 1 << 24


def _frames_at_once(queries: Tensor, tokens_per_frame: int) -> int:
    """Return how many key frames are processed together.

    One on a CPU, where hidden pairs would cost time. On a GPU, a short clip takes longer to launch than to compute.
    """
    b, times, rows, _ = queries.shape
    if queries.device.type == "cpu":
        return 1
    return min(max(1, _GPU_TABLE // (b * times * rows * tokens_per_frame)), times)


def _chunks(queries: Tensor, x: Tensor, scope: AttentionScope, window: int | None) -> Iterator[_Keys]:
    times, count = queries.shape[1], x.shape[2]
    size = _frames_at_once(queries, count)
    for begin in range(0, times, size):
        frames = slice(begin, min(begin + size, times))
        shape = frames.stop - begin, count
        if scope == "all":
            yield _Keys(frames, shape, slice(0, times), None)
            continue
        seen_by = slice(begin, times if window is None else min(times, frames.stop - 1 + window))
        hidden = None
        if shape[0] > 1:
            age = torch.arange(seen_by.start, seen_by.stop, device=x.device)[:, None]
            age = age - torch.arange(begin, frames.stop, device=x.device)
            hidden = (age < 0) | (age >= (times if window is None else window))
            hidden = hidden[:, None, :, None]
        yield _Keys(frames, shape, seen_by, hidden)


def _factor(table: Tensor, keys: _Keys) -> Tensor:
    """Return the part of a table (T, T, R) that belongs to these frames, as (t, R, C, 1)."""
    return table[keys.query_times, keys.frames].transpose(1, 2)[..., None]


def _attention_weights(
    raw: Tensor, offset: Tensor, rstd: Tensor, bias: Tensor | None, keys: _Keys, softmax_scope: str
) -> Tensor:
    """Return the weights (b, t, R, C, N) of each row for the tokens of `keys`, fp32 at least, from the raw products."""
    add = offset[:, keys.query_times, :, None, None]
    if bias is not None:
        add = add + _factor(bias, keys)
    logits = torch.addcmul(add, raw.to(offset.dtype), rstd[:, None, None, keys.frames])
    if softmax_scope == "time":
        shares = F.softmax(logits, dim=2)
        return shares if keys.hidden is None else shares.masked_fill_(keys.hidden, 0.0)
    if keys.hidden is not None:
        logits = logits.masked_fill_(keys.hidden, -math.inf)  # each frame is seen by its own time at least
    return F.softmax(logits.flatten(1, 2), dim=1).view(logits.shape)
