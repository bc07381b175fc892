"""A binder's attention to tokens, key frame by key frame: who competes for a token stands beside each other at once, so a frame's
shares are final when it is met, and only their sums go on. Nothing of the size of all times' tokens by all times' slots is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

AttentionScope = Literal["earlier", "all"]


class Tokens(NamedTuple):
    """x (b, T, N, W) as they are, of T frames; mean, rstd (b, T, N) fp32 of each: rstd * (x - mean) is what is attended to, and is never made.

    Gradients go to `x` alone, those through its mean and deviation included.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def with_statistics(cls, x: Tensor, eps: float) -> Tokens:
        """With their statistics, as a LayerNorm without weights takes them."""
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            # Frame by frame: statistics in fp32 of 16-bit tokens would copy the whole clip at once.
            frames = (frame.to(exact) for frame in x.detach().unbind(1))
            statistics = [torch.native_layer_norm(frame, frame.shape[-1:], None, None, eps)[1:] for frame in frames]
        return cls(x, *(torch.stack(column, 1).squeeze(-1) for column in zip(*statistics, strict=True)))


class AttentionSums(NamedTuple):
    """weighted_sum (b, T, R, W): sums of standardised tokens by shares.  total (b, T, R): sums of shares.  attention (b, T, R, N): shares of a time's
    own tokens, without a gradient; None where they were not asked for.  x: the tokens, for who attends to them next: gradients of all
    who do so in turn are added up in one table."""

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
    """Inverted attention of R rows per time (slots of each head) to standardised tokens.

    Args:
        queries: (b, T, R, W), scaled.  offset: (b, T, R), of all logits of a row.
        bias: (T, T, R), of the logits of a time and what it sees; None: none.
        scope: a time looks at itself and earlier ones, or at all.  window: at so many of the last ones.
        softmax_scope: rows of one time share a token, or those of all times that see it.
        weight: (T, T, R), of the shares that a time takes of what it sees; None: ones.
    """
    device, x = queries.device.type, tokens.x
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        # q (x - mean) is (q - its mean) x: centred queries, and sums that are centred behind, spare every token's centring.
        queries = queries - queries.mean(-1, keepdim=True)
        if autocast_dtype is not None:
            queries, x = queries.to(autocast_dtype), x.to(autocast_dtype)
        options = scope, softmax_scope, window, with_attention
        weighted_sum, total, attention, next_x = _InvertedAttention.apply(
            queries, offset.to(tokens.mean.dtype), x, tokens.mean, tokens.rstd, bias, weight, options
        )  # type: ignore[misc]
        weighted_sum = weighted_sum - weighted_sum.mean(-1, keepdim=True)
    # In 16 bits each gradient is rounded once, and they are added in the tokens' own type.
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
    """The same of tokens x (b, T, N, W) without competition: every row's shares of all tokens that it sees sum to one, `total` is ones;
    what is added to all logits of a row would change nothing.

    `attention` is of a time's tokens alone, brought to a sum of one per token, as masks are made of it.
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
        # For masks alone, so without a graph: nobody learns from what is only looked at.
        attention = None
        if with_attention:
            with torch.no_grad():
                attention = torch.softmax(queries @ z.transpose(-1, -2), -1)
                attention = attention / attention.sum(2, keepdim=True).clamp(min=1e-12)
    return AttentionSums(torch.stack(weighted_sums, 1), z.new_ones(queries.shape[:3]), attention, x)


class _InvertedAttention(torch.autograd.Function):
    """Of centred queries. Backward makes every frame's shares again: products of R by N per pair of times, against keeping them."""

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
        # In fp32 at least: sums over all times of shares of one.
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
            # The deviation goes into the shares, which are (R, N), not into the tokens, which are (N, W).
            weights = shares.mul_(rstd[:, s, None, None]).flatten(1, 2).to(x.dtype)
            weighted_sum[:, query_times] += (weights @ x[:, s]).view(b, -1, rows, wide)
        ctx.save_for_backward(queries, offset, x, mean, rstd, bias, weight)
        ctx.how = scope, softmax_scope, window
        ctx.mark_non_differentiable(attention)
        ctx.set_materialize_grads(False)  # nobody may go on with x, and zeros of its size are what is spared
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
        # Where backward is called inside an autocast block, its products would be in another precision than forward's.
        with torch.autocast(saved[0].device.type, enabled=False):
            return _gradients(saved, ctx.how, d_weighted_sum, d_total, d_next)


def _gradients(
    saved: Sequence[Tensor], options: Any, d_weighted_sum: Tensor | None, d_total: Tensor | None, d_next: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of `_InvertedAttention`'s eight arguments, from the tensors that forward saved."""
    queries, offset, x, mean, rstd, bias, weight = saved
    scope, softmax_scope, window = options
    b, times, rows, wide = queries.shape
    if d_weighted_sum is None:
        d_weighted_sum = torch.zeros_like(queries, dtype=offset.dtype)
    if d_total is None:
        d_total = torch.zeros_like(offset)
    d_queries, d_offset = torch.zeros_like(d_weighted_sum), torch.zeros_like(offset)
    # The table of who went on with x is nobody else's: written to in place, all blocks need one and not three.
    d_x = torch.zeros_like(x) if d_next is None else d_next
    d_bias, d_weight = (None if table is None else torch.zeros_like(table) for table in (bias, weight))
    ones = x.new_ones(b, 1, wide)
    for s in range(times):
        query_times, r = _query_times(s, times, scope, window), rstd[:, s, None, None]
        # Beside each other: twice as many rows to a product are done sooner than two of them.
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
        # A softmax's: shares * (gradient - its mean by shares), over all who compete for a token.
        competitor_sum = (
            d_shares.sum(2, keepdim=True) if softmax_scope == "time" else d_shares.sum((1, 2), keepdim=True)
        )
        d_logits = d_shares.addcmul_(shares, competitor_sum, value=-1)
        d_offset[:, query_times] += d_logits.sum(-1)
        if d_bias is not None:
            d_bias[query_times, s] += d_logits.sum((0, 3))
        if weight is not None:
            shares = shares * weight[query_times, s, :, None]
        # What x gets through its deviation, which all numbers of a token share: slope * (x - mean).
        both[:, 0], both[:, 1] = raw * d_logits, inner * shares
        # Of rstd the derivative is its cube over the number of its terms, times what is centred.
        slope = both.sum((1, 2, 3)) * rstd[:, s] ** 3 / -wide
        both[:, 0], both[:, 1] = d_logits * r, shares * r
        rest = (slope * mean[:, s]).neg_()[:, None].to(x.dtype)
        weights = torch.cat([both.flatten(1, 3).to(x.dtype), rest], 1)
        # The first half of the rows is what queries get; the second, and `rest`, are for x alone.
        d_queries[:, query_times] += (weights[:, : raw.shape[1] * rows] @ x[:, s]).view(b, -1, rows, wide)
        torch.baddbmm(d_x[:, s], weights.transpose(1, 2), stacked_rows, out=d_x[:, s])
        d_x[:, s].addcmul_(x[:, s], slope[..., None].to(x.dtype))
    return d_queries.to(queries.dtype), d_offset, d_x, None, None, d_bias, d_weight, None


def _query_times(s: int, times: int, scope: AttentionScope, window: int | None) -> slice:
    """Which times look at key frame `s`."""
    if scope == "all":
        return slice(0, times)
    return slice(s, times if window is None else min(times, s + window))


def _attention_weights(
    raw: Tensor, offset: Tensor, rstd: Tensor, bias: Tensor | None, s: int, query_times: slice, softmax_scope: str
) -> Tensor:
    """Products (b, t, R, N) with the tokens of frame `s` to what each row of the times that look takes of them, fp32 at least."""
    add = offset[:, query_times] if bias is None else offset[:, query_times] + bias[query_times, s]
    logits = torch.addcmul(add[..., None], raw.to(offset.dtype), rstd[:, s, None, None])
    if softmax_scope == "time":
        return F.softmax(logits, dim=2)
    return F.softmax(logits.flatten(1, 2), dim=1).view(logits.shape)
