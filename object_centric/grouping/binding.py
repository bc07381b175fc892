"""A binder's attention to tokens, key frame by key frame: who competes for a token stands beside each other at once, so a frame's
shares are final when it is met, and only their sums go on. Nothing of the size of all times' tokens by all times' slots is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Sees = Literal["earlier", "all"]


class Tokens(NamedTuple):
    """x (b, T, N, W) as they are, of T frames; mean, rstd (b, T, N) fp32 of each: rstd * (x - mean) is what is attended to, and is never made.

    Gradients go to `x` alone, those through its mean and deviation included.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def of(cls, x: Tensor, eps: float) -> Tokens:
        """With their statistics, as a LayerNorm without weights takes them."""
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            # Frame by frame: statistics in fp32 of 16-bit tokens would copy the whole clip at once.
            frames = (frame.to(exact) for frame in x.detach().unbind(1))
            found = [torch.native_layer_norm(frame, frame.shape[-1:], None, None, eps)[1:] for frame in frames]
        return cls(x, *(torch.stack(column, 1).squeeze(-1) for column in zip(*found, strict=True)))


class Bound(NamedTuple):
    """taken (b, T, R, W): sums of standardised tokens by shares.  total (b, T, R): sums of shares.  own (b, T, R, N): shares of a time's
    own tokens, without a gradient; None where they were not asked for.  x: the tokens, for who attends to them next: gradients of all
    who do so in turn are added up in one table."""

    taken: Tensor
    total: Tensor
    own: Tensor | None
    x: Tensor


def bound(
    queries: Tensor,
    offset: Tensor,
    tokens: Tokens,
    bias: Tensor | None,
    sees: Sees,
    competes: Literal["time", "clip"] = "time",
    window: int | None = None,
    with_own: bool = False,
    weight: Tensor | None = None,
) -> Bound:
    """Inverted attention of R rows per time (slots of each head) to standardised tokens.

    Args:
        queries: (b, T, R, W), scaled.  offset: (b, T, R), of all logits of a row.
        bias: (T, T, R), of the logits of a time and what it sees; None: none.
        sees: a time looks at itself and earlier ones, or at all.  window: at so many of the last ones.
        competes: rows of one time share a token, or those of all times that see it.
        weight: (T, T, R), of the shares that a time takes of what it sees; None: ones.
    """
    device, x = queries.device.type, tokens.x
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        # q (x - mean) is (q - its mean) x: centred queries, and sums that are centred behind, spare every token's centring.
        queries = queries - queries.mean(-1, keepdim=True)
        if low is not None:
            queries, x = queries.to(low), x.to(low)
        how = sees, competes, window, with_own
        taken, total, own, following = _Streamed.apply(
            queries, offset.to(tokens.mean.dtype), x, tokens.mean, tokens.rstd, bias, weight, how
        )  # type: ignore[misc]
        taken = taken - taken.mean(-1, keepdim=True)
    # In 16 bits each gradient is rounded once, and they are added in the tokens' own type.
    return Bound(taken, total, own if with_own else None, following if low is None else tokens.x)


def chosen(
    queries: Tensor,
    x: Tensor,
    eps: float,
    bias: Tensor | None,
    sees: Sees,
    window: int | None = None,
    with_own: bool = False,
) -> Bound:
    """The same of tokens x (b, T, N, W) without competition: every row's shares of all tokens that it sees sum to one, `total` is ones;
    what is added to all logits of a row would change nothing.

    `own` is of a time's tokens alone, brought to a sum of one per token, as masks are made of it.
    """
    times, device = queries.shape[1], queries.device.type
    with torch.autocast(device, enabled=False):
        z = F.layer_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=eps)
        queries = queries.to(z.dtype)
        taken = []
        for t in range(times):
            first = 0 if window is None or sees == "all" else max(t + 1 - window, 0)
            seen = z[:, first : (times if sees == "all" else t + 1)]
            mask = None
            if bias is not None:
                mask = bias[t, first : first + seen.shape[1]].T.repeat_interleave(seen.shape[2], 1)[None].to(z.dtype)
            keys = seen.flatten(1, 2)
            taken.append(F.scaled_dot_product_attention(queries[:, t], keys, keys, attn_mask=mask, scale=1.0))
        # For masks alone, so without a graph: nobody learns from what is only looked at.
        own = None
        if with_own:
            with torch.no_grad():
                own = torch.softmax(queries @ z.transpose(-1, -2), -1)
                own = own / own.sum(2, keepdim=True).clamp(min=1e-12)
    return Bound(torch.stack(taken, 1), z.new_ones(queries.shape[:3]), own, x)


class _Streamed(torch.autograd.Function):
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
        how: Any,
    ) -> Any:
        sees, competes, window, with_own = how
        b, times, rows, wide = queries.shape
        # In fp32 at least: sums over all times of shares of one.
        taken, total = offset.new_zeros(b, times, rows, wide), torch.zeros_like(offset)
        own = offset.new_zeros((b, times, rows, x.shape[2]) if with_own else (0,))
        for s in range(times):
            there = _looking(s, times, sees, window)
            raw = queries[:, there].flatten(1, 2) @ x[:, s].transpose(1, 2)
            shares = _shares(raw.view(b, -1, rows, x.shape[2]), offset, rstd, bias, s, there, competes)
            if with_own:
                own[:, s] = shares[:, s - there.start]
            if weight is not None:
                shares = shares * weight[there, s, :, None]
            total[:, there] += shares.sum(-1)
            # The deviation goes into the shares, which are (R, N), not into the tokens, which are (N, W).
            weights = shares.mul_(rstd[:, s, None, None]).flatten(1, 2).to(x.dtype)
            taken[:, there] += (weights @ x[:, s]).view(b, -1, rows, wide)
        ctx.save_for_backward(queries, offset, x, mean, rstd, bias, weight)
        ctx.how = sees, competes, window
        ctx.mark_non_differentiable(own)
        ctx.set_materialize_grads(False)  # nobody may go on with x, and zeros of its size are what is spared
        return taken, total, own, x

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_taken: Tensor | None, d_total: Tensor | None, _own: Tensor | None, d_next: Tensor | None
    ) -> Any:
        saved = ctx.saved_tensors
        # Where backward is called inside an autocast block, its products would be in another precision than forward's.
        with torch.autocast(saved[0].device.type, enabled=False):
            return _gradients(saved, ctx.how, d_taken, d_total, d_next)


def _gradients(
    saved: Sequence[Tensor], how: Any, d_taken: Tensor | None, d_total: Tensor | None, d_next: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of `_Streamed`'s eight arguments, from the tensors that forward saved."""
    queries, offset, x, mean, rstd, bias, weight = saved
    sees, competes, window = how
    b, times, rows, wide = queries.shape
    if d_taken is None:
        d_taken = torch.zeros_like(queries, dtype=offset.dtype)
    if d_total is None:
        d_total = torch.zeros_like(offset)
    d_queries, d_offset = torch.zeros_like(d_taken), torch.zeros_like(offset)
    # The table of who went on with x is nobody else's: written to in place, all blocks need one and not three.
    d_x = torch.zeros_like(x) if d_next is None else d_next
    d_bias, d_weight = (None if table is None else torch.zeros_like(table) for table in (bias, weight))
    ones = x.new_ones(b, 1, wide)
    for s in range(times):
        there, r = _looking(s, times, sees, window), rstd[:, s, None, None]
        # Beside each other: twice as many rows to a product are done sooner than two of them.
        asked = torch.cat([queries[:, there].flatten(1, 2), d_taken[:, there].to(x.dtype).flatten(1, 2), ones], 1)
        both = (asked[:, :-1] @ x[:, s].transpose(1, 2)).to(offset.dtype).view(b, 2, -1, rows, x.shape[2])
        raw, inner = both.unbind(1)
        shares = _shares(raw, offset, rstd, bias, s, there, competes)
        d_shares = (inner * r).add_(d_total[:, there, :, None]).mul_(shares)
        if weight is not None and d_weight is not None:
            d_weight[there, s] += d_shares.sum((0, 3))
            d_shares = d_shares * weight[there, s, :, None]
        # A softmax's: shares * (gradient - its mean by shares), over all who compete for a token.
        among = d_shares.sum(2, keepdim=True) if competes == "time" else d_shares.sum((1, 2), keepdim=True)
        d_logits = d_shares.addcmul_(shares, among, value=-1)
        d_offset[:, there] += d_logits.sum(-1)
        if d_bias is not None:
            d_bias[there, s] += d_logits.sum((0, 3))
        if weight is not None:
            shares = shares * weight[there, s, :, None]
        # What x gets through its deviation, which all numbers of a token share: slope * (x - mean).
        both[:, 0], both[:, 1] = raw * d_logits, inner * shares
        # Of rstd the derivative is its cube over the number of its terms, times what is centred.
        slope = both.sum((1, 2, 3)) * rstd[:, s] ** 3 / -wide
        both[:, 0], both[:, 1] = d_logits * r, shares * r
        rest = (slope * mean[:, s]).neg_()[:, None].to(x.dtype)
        weights = torch.cat([both.flatten(1, 3).to(x.dtype), rest], 1)
        # The first half of the rows is what queries get; the second, and `rest`, are for x alone.
        d_queries[:, there] += (weights[:, : raw.shape[1] * rows] @ x[:, s]).view(b, -1, rows, wide)
        torch.baddbmm(d_x[:, s], weights.transpose(1, 2), asked, out=d_x[:, s])
        d_x[:, s].addcmul_(x[:, s], slope[..., None].to(x.dtype))
    return d_queries.to(queries.dtype), d_offset, d_x, None, None, d_bias, d_weight, None


def _looking(s: int, times: int, sees: Sees, window: int | None) -> slice:
    """Which times look at key frame `s`."""
    if sees == "all":
        return slice(0, times)
    return slice(s, times if window is None else min(times, s + window))


def _shares(
    raw: Tensor, offset: Tensor, rstd: Tensor, bias: Tensor | None, s: int, there: slice, competes: str
) -> Tensor:
    """Products (b, t, R, N) with the tokens of frame `s` to what each row of the times that look takes of them, fp32 at least."""
    add = offset[:, there] if bias is None else offset[:, there] + bias[there, s]
    logits = torch.addcmul(add[..., None], raw.to(offset.dtype), rstd[:, s, None, None])
    if competes == "time":
        return F.softmax(logits, dim=2)
    return F.softmax(logits.flatten(1, 2), dim=1).view(logits.shape)
