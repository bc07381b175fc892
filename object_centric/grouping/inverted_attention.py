"""A binder's attention to tokens, one key frame at a time.

All queries that compete for a frame's tokens are processed together, so the frame's weights are final at once and only
sums are kept. No table of all times' tokens by all times' slots is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

AttentionScope = Literal["earlier", "all"]


class Tokens(NamedTuple):
    """Tokens of T frames.

    Gradients go to `x` only, including those through its mean and deviation.

    Attributes:
        x: (b, T, N, W).
        mean, rstd: (b, T, N) fp32. Attention is to rstd * (x - mean), which is never stored.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def with_statistics(cls, x: Tensor, eps: float) -> Tokens:
        """Compute the statistics as in a LayerNorm without weights."""
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            # Frame by frame, because fp32 statistics of 16-bit tokens would copy the whole clip at once.
            frames = (frame.to(exact) for frame in x.detach().unbind(1))
            statistics = [torch.native_layer_norm(frame, frame.shape[-1:], None, None, eps)[1:] for frame in frames]
        return cls(x, *(torch.stack(column, 1).squeeze(-1) for column in zip(*statistics, strict=True)))


class AttentionSums(NamedTuple):
    """Result of attention.

    Attributes:
        weighted_sum: (b, T, R, W), sums of standardised tokens by weights.
        total: (b, T, R), sums of weights.
        attention: (b, T, R, N), weights of a time's own tokens, without gradient; None if not requested.
        x: the tokens, to be used by the next attention to them, so that the gradients of all are accumulated in one
            table.
    """

    weighted_sum: Tensor
    total: Tensor
    attention: Tensor | None
    x: Tensor


def inverted_attention(
    queries: Tensor,
    offset: Tensor,
    tokens: Tokens,
    bias: Tensor | None,
    scope: AttentionScope,
    softmax_scope: Literal["time", "clip"] = "time",
    window: int | None = None,
    with_attention: bool = False,
    weight: Tensor | None = None,
) -> AttentionSums:
    """Compute inverted attention of R rows per time (slots of each head) to standardised tokens.

    Args:
        queries: (b, T, R, W), scaled.
        offset: (b, T, R), added to all logits of a row.
        tokens: the tokens.
        bias: (T, T, R), added to the logits of a time and a frame it sees; None: none.
        scope: whether a time sees itself and earlier frames, or all.
        softmax_scope: whether rows of one time share a token, or those of all times that see it.
        window: number of last frames that a time sees.
        with_attention: also return attention.
        weight: (T, T, R), factor of the weights of each frame that a time sees; None: ones.
    """
    device, x = queries.device.type, tokens.x
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        # q (x - mean) is (q - its mean) x, so queries and sums are centred instead of every token.
        queries = queries - queries.mean(-1, keepdim=True)
        if autocast_dtype is not None:
            queries, x = queries.to(autocast_dtype), x.to(autocast_dtype)
        options = scope, softmax_scope, window, with_attention
        weighted_sum, total, attention, next_x = _InvertedAttention.apply(
            queries, offset.to(tokens.mean.dtype), x, tokens.mean, tokens.rstd, bias, weight, options
        )  # type: ignore[misc]
        weighted_sum = weighted_sum - weighted_sum.mean(-1, keepdim=True)
    # In 16 bits, each gradient is rounded once and accumulated in the tokens' dtype.
    return AttentionSums(
        weighted_sum, total, attention if with_attention else None, next_x if autocast_dtype is None else tokens.x
    )


def softmax_attention(
    queries: Tensor,
    x: Tensor,
    eps: float,
    bias: Tensor | None,
    scope: AttentionScope,
    window: int | None = None,
    with_attention: bool = False,
) -> AttentionSums:
    """Compute ordinary attention to tokens x (b, T, N, W), without competition.

    Every row's weights of all tokens that it sees sum to one, so `total` is ones, and a common offset of a row's logits
    has no effect. `attention` covers a time's own tokens, normalized to a sum of one per token for masks.
    """
    times, device = queries.shape[1], queries.device.type
    with torch.autocast(device, enabled=False):
        z = F.layer_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=eps)
        queries = queries.to(z.dtype)
        weighted_sums = []
        for t in range(times):
            first = 0 if window is None or scope == "all" else max(t + 1 - window, 0)
            visible_tokens = z[:, first : (times if scope == "all" else t + 1)]
            mask = None
            if bias is not None:
                mask = (
                    bias[t, first : first + visible_tokens.shape[1]]
                    .T.repeat_interleave(visible_tokens.shape[2], 1)[None]
                    .to(z.dtype)
                )
            keys = visible_tokens.flatten(1, 2)
            weighted_sums.append(F.scaled_dot_product_attention(queries[:, t], keys, keys, attn_mask=mask, scale=1.0))
        # For masks only, so without a graph.
        attention = None
        if with_attention:
            with torch.no_grad():
                attention = torch.softmax(queries @ z.transpose(-1, -2), -1)
                attention = attention / attention.sum(2, keepdim=True).clamp(min=1e-12)
    return AttentionSums(torch.stack(weighted_sums, 1), z.new_ones(queries.shape[:3]), attention, x)


class _InvertedAttention(torch.autograd.Function):
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
        for s in range(times):
            query_times = _query_times(s, times, scope, window)
            raw = queries[:, query_times].flatten(1, 2) @ x[:, s].transpose(1, 2)
            shares = _attention_weights(
                raw.view(b, -1, rows, x.shape[2]), offset, rstd, bias, s, query_times, softmax_scope
            )
            if with_attention:
                attention[:, s] = shares[:, s - query_times.start]
            if weight is not None:
                shares = shares * weight[query_times, s, :, None]
            total[:, query_times] += shares.sum(-1)
            # Scale the weights (R, N) by the deviation instead of the tokens (N, W).
            weights = shares.mul_(rstd[:, s, None, None]).flatten(1, 2).to(x.dtype)
            weighted_sum[:, query_times] += (weights @ x[:, s]).view(b, -1, rows, wide)
        ctx.save_for_backward(queries, offset, x, mean, rstd, bias, weight)
        ctx.how = scope, softmax_scope, window
        ctx.mark_non_differentiable(attention)
        ctx.set_materialize_grads(False)  # no later use of x, so a table of zeros is avoided
        return weighted_sum, total, attention, x

    @staticmethod
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
    """Return the gradients of `_InvertedAttention`'s eight arguments, from the tensors that forward saved."""
    queries, offset, x, mean, rstd, bias, weight = saved
    scope, softmax_scope, window = options
    b, times, rows, wide = queries.shape
    if d_weighted_sum is None:
        d_weighted_sum = torch.zeros_like(queries, dtype=offset.dtype)
    if d_total is None:
        d_total = torch.zeros_like(offset)
    d_queries, d_offset = torch.zeros_like(d_weighted_sum), torch.zeros_like(offset)
    # The gradient of the later use of x belongs to this function: writing in place, all blocks need one table instead
    # of three.
    d_x = torch.zeros_like(x) if d_next is None else d_next
    d_bias, d_weight = (None if table is None else torch.zeros_like(table) for table in (bias, weight))
    ones = x.new_ones(b, 1, wide)
    for s in range(times):
        query_times, r = _query_times(s, times, scope, window), rstd[:, s, None, None]
        # Concatenated, because one larger product is faster than two.
        stacked_rows = torch.cat(
            [queries[:, query_times].flatten(1, 2), d_weighted_sum[:, query_times].to(x.dtype).flatten(1, 2), ones], 1
        )
        both = (stacked_rows[:, :-1] @ x[:, s].transpose(1, 2)).to(offset.dtype).view(b, 2, -1, rows, x.shape[2])
        raw, inner = both.unbind(1)
        shares = _attention_weights(raw, offset, rstd, bias, s, query_times, softmax_scope)
        d_shares = (inner * r).add_(d_total[:, query_times, :, None]).mul_(shares)
        if weight is not None and d_weight is not None:
            d_weight[query_times, s] += d_shares.sum((0, 3))
            d_shares = d_shares * weight[query_times, s, :, None]
        # Softmax backward: weights * (gradient - its weighted mean), over all that compete for a token.
        competitor_sum = (
            d_shares.sum(2, keepdim=True) if softmax_scope == "time" else d_shares.sum((1, 2), keepdim=True)
        )
        d_logits = d_shares.addcmul_(shares, competitor_sum, value=-1)
        d_offset[:, query_times] += d_logits.sum(-1)
        if d_bias is not None:
            d_bias[query_times, s] += d_logits.sum((0, 3))
        if weight is not None:
            shares = shares * weight[query_times, s, :, None]
        # The gradient of x through its deviation, which all values of a token share: slope * (x - mean).
        both[:, 0], both[:, 1] = raw * d_logits, inner * shares
        # The derivative of rstd is its cube divided by the number of terms, times the centred values.
        slope = both.sum((1, 2, 3)) * rstd[:, s] ** 3 / -wide
        both[:, 0], both[:, 1] = d_logits * r, shares * r
        rest = (slope * mean[:, s]).neg_()[:, None].to(x.dtype)
        weights = torch.cat([both.flatten(1, 3).to(x.dtype), rest], 1)
        # The first half of the rows is the gradient of queries; the second, and `rest`, are for x only.
        d_queries[:, query_times] += (weights[:, : raw.shape[1] * rows] @ x[:, s]).view(b, -1, rows, wide)
        d_x[:, s].baddbmm_(weights.transpose(1, 2), stacked_rows)
        d_x[:, s].addcmul_(x[:, s], slope[..., None].to(x.dtype))
    return d_queries.to(queries.dtype), d_offset, d_x, None, None, d_bias, d_weight, None


def _query_times(s: int, times: int, scope: AttentionScope, window: int | None) -> slice:
    """Return the times that see key frame `s`."""
    if scope == "all":
        return slice(0, times)
    return slice(s, times if window is None else min(times, s + window))


def _attention_weights(
    raw: Tensor, offset: Tensor, rstd: Tensor, bias: Tensor | None, s: int, query_times: slice, softmax_scope: str
) -> Tensor:
    """Return the raw products (b, t, R, N) with the tokens of frame `s` and the weights of each row of the times that see it, fp32 at least."""
    add = offset[:, query_times] if bias is None else offset[:, query_times] + bias[query_times, s]
    logits = torch.addcmul(add[..., None], raw.to(offset.dtype), rstd[:, s, None, None])
    if softmax_scope == "time":
        return F.softmax(logits, dim=2)
    return F.softmax(logits.flatten(1, 2), dim=1).view(logits.shape)
