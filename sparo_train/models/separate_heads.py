"""Attention with learned queries and a head per slot, without making keys or values of any token: the core of SPARO and of Table 6.

What the heads read is V_l p_l + b_l, with p_l = sum_n a_ln x_n and a_l = softmax_n(x_n . K_l^T q_l / sqrt(D)); models/sparo.py says
why that equals attention as it is usually written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .readout import ReadOut


class _AttendPoolProject(torch.autograd.Function):
    """Scores, softmax, pooling and value projection with the backward written out.

    Autograd would hold two gradients of the tokens and two of K at once and copy between layouts; here each second
    contribution is added by the matrix product that makes it (peak memory and a third of the time, see benchmarks/readout.py).

    Shapes: tokens (B, N, d); query (H, G, D), scaled; key (H, D, d); value likewise, None when it is the key;
    constant (L,) or None; keep (B, N) bool or None. Returns read (H, B*G, D) and attention (B, L, N), L = H*G.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        constant: Tensor | None,
        keep: Tensor | None,
    ):
        heads, group, _ = query.shape
        # The inputs were cast when they came in; a second cast inside would copy them.
        with torch.autocast(tokens.device.type, enabled=False):
            # The keys of all tokens are never made: d numbers per slot take their place.
            weight = torch.bmm(query, key).flatten(0, 1)  # w_l, (L, d)
            scores = weight @ tokens.transpose(1, 2)
            if constant is not None:
                scores = scores + constant.to(scores.dtype)[:, None]
            if keep is not None:
                # In place: nothing before it is needed again.
                scores = scores.masked_fill_(~keep[:, None, :], -torch.inf)
            # In fp32 at least: sums of exponentials in 16 bits lose the far tokens.
            attention = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
            pooled = _by_head(attention @ tokens, heads, group)  # p_l, (H, B*G, d)
            read = torch.bmm(pooled, (key if value is None else value).transpose(1, 2))
        ctx.save_for_backward(tokens, query, key, value, weight, attention, pooled)
        ctx.constant = constant is not None
        ctx.set_materialize_grads(False)  # attention maps are mostly looked at, seldom differentiated
        return read, attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        d_read, d_attention = grad_outputs
        tokens, query, key, value, weight, attention, pooled = ctx.saved_tensors
        if d_read is None:
            d_read = torch.zeros_like(pooled[..., : query.shape[-1]])
        # A loop that calls backward inside its autocast block would cast each product anew, and some to another dtype.
        with torch.autocast(tokens.device.type, enabled=False):
            return _gradients(d_read, d_attention, tokens, query, key, value, weight, attention, pooled, ctx.constant)


def _gradients(
    d_read: Tensor,
    d_attention: Tensor | None,
    tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor,
    attention: Tensor,
    pooled: Tensor,
    with_constant: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of tokens, query, key, value, constant and keep; None where there is none."""
    heads, group, _ = query.shape
    # V's gradient is the same product as the forward's, turned around.
    d_value = torch.bmm(d_read.transpose(1, 2), pooled)
    d_pooled = (
        torch.bmm(d_read, key if value is None else value)
        .view(heads, len(tokens), group, -1)
        .transpose(0, 1)
        .flatten(1, 2)
    )
    d_scores = d_pooled @ tokens.transpose(1, 2)
    if d_attention is not None:
        d_scores = d_scores + d_attention
    # The softmax's own gradient, from the map that is saved anyway.
    d_scores = attention * (d_scores - (attention * d_scores).sum(-1, keepdim=True))
    d_tokens = torch.bmm(attention.transpose(1, 2), d_pooled)
    # Added by the product itself: a second gradient of the tokens is never held.
    d_tokens.baddbmm_(d_scores.transpose(1, 2), weight.expand(len(tokens), -1, -1))
    # Over batch and tokens at once: one product, not B of them that would be added.
    d_weight = (d_scores.transpose(0, 1).flatten(1) @ tokens.flatten(0, 1)).view(heads, group, -1)
    d_query = torch.bmm(d_weight, key.transpose(1, 2))
    if value is None:  # K's two gradients in one buffer
        d_key, d_value = d_value.baddbmm_(query.transpose(1, 2), d_weight), None
    else:
        d_key = torch.bmm(query.transpose(1, 2), d_weight)
    # The key's bias moves all scores of a slot alike; its gradient is zero but for rounding, and has to exist.
    d_constant = d_scores.sum((0, 2)) if with_constant else None
    return d_tokens, d_query, d_key, d_value, d_constant, None


def _by_head(x: Tensor, heads: int, group: int) -> Tensor:
    """(B, L, d) -> (H, B*G, d)."""
    return x.view(len(x), heads, group, -1).transpose(0, 1).flatten(1, 2)


class SeparateHeads(ReadOut):
    """L heads of D numbers over tokens of d. A subclass says what becomes of what they read, and calls `reset_heads`.

    Args:
        dim: d, width of the tokens.
        slots: L, how many heads attend separately.
        head_width: D, width of queries, keys and values.
        grp_size: heads that share one key (and value) projection.
        share_kv: values are the keys.

    Parameters have the names and shapes of the sparo-clip repository: `q_emb` (1, L/grp, grp, 1, D), `k.weight`
    (L/grp*D, d), `k.bias`, `v.*` (only without sharing).

    Raises:
        ValueError: `grp_size` does not divide `slots`.
    """

    adamw_only_parameters = ("k.weight", "v.weight")

    def __init__(self, dim: int, slots: int, head_width: int, grp_size: int = 1, share_kv: bool = True):
        super().__init__()
        if slots % grp_size:
            raise ValueError(f"grp_size={grp_size} does not divide slots={slots}")
        self.dim, self.slots, self.head_width = dim, slots, head_width
        self.heads, self.grp_size = slots // grp_size, grp_size
        self.scale = head_width**-0.5
        self.q_emb = nn.Parameter(torch.empty(1, self.heads, grp_size, 1, head_width))
        self.k = nn.Linear(dim, self.heads * head_width)
        # No parameter at all: an alias would be saved and counted twice.
        self.v = None if share_kv else nn.Linear(dim, self.heads * head_width)

    def reset_heads(self) -> None:
        """q ~ N(0, 1); K (and V) xavier-uniform over the whole matrix; biases zero (Appendix A)."""
        nn.init.normal_(self.q_emb)
        for linear in (self.k, self.v):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def attend(self, tokens: Tensor, keep: Tensor | None, map_slots: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """What the heads read of tokens (B, N, d), (B, L, D), through `map_slots` where given, and attention (B, L, N) in the computed dtype.

        Args:
            keep: (B, N) bool, True where a position may be attended; None for all. Every row needs at least one True.
            map_slots: D numbers of every head to others.
        """
        values = self.v or self.k
        device = tokens.device.type
        # Autocast does not see inside: the cast is made once here, where the inputs are.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.k.weight.dtype
        # Scaled once, on L * D numbers, not on every score.
        query = (self.q_emb * self.scale).view(self.heads, self.grp_size, self.head_width)
        key = self.k.weight.view(self.heads, self.head_width, self.dim)
        value = None if self.v is None else self.v.weight.view(self.heads, self.head_width, self.dim).to(dtype)
        # With values of their own the key bias would get no gradient at all; as a constant per slot it gets its zero.
        constant = None if self.v is None else torch.bmm(query, self.k.bias.view(self.heads, -1, 1)).flatten()
        read, attention = _AttendPoolProject.apply(
            tokens.to(dtype), query.to(dtype), key.to(dtype), value, constant, keep
        )  # (heads, B*grp, D), (B, L, N)
        read = read + values.bias.view(self.heads, 1, self.head_width).to(dtype)
        read = read if map_slots is None else map_slots(read)  # before the copy below: it is over fewer numbers, mostly
        return read.view(self.heads, -1, self.grp_size, read.shape[-1]).transpose(0, 1).flatten(1, 2), attention

    def attend_plain(self, tokens: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """`attend` as Appendix A has it: keys and values for every token and head. Same parameters, same result, slower."""
        batch, length, _ = tokens.shape

        def heads(linear: nn.Linear) -> Tensor:
            x = linear(tokens).view(batch, length, self.heads, 1, self.head_width)
            return x.expand(-1, -1, -1, self.grp_size, -1).permute(0, 2, 3, 1, 4)  # (B, heads, grp, N, D)

        keys = heads(self.k)
        values = keys if self.v is None else heads(self.v)
        scores = (self.q_emb * self.scale) @ keys.transpose(-2, -1)  # (B, heads, grp, 1, N)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, None, :], -torch.inf)
        attention = scores.softmax(dim=-1)
        return (attention @ values).reshape(batch, self.slots, self.head_width), attention.reshape(
            batch, self.slots, length
        )


def optional_attention(attention: Tensor, need_attention: bool) -> Tensor | None:
    """Attention maps as `Slots` gives them: in fp32 at least, or None where nobody asked."""
    return attention.to(torch.promote_types(attention.dtype, torch.float32)) if need_attention else None
