"""Attention with learned queries and one head per slot, without computing keys or values of any token: the core of SPARO and Table 6.

Head l reads V_l p_l + b_l, with p_l = sum_n a_ln x_n and a_l = softmax_n(x_n . K_l^T q_l / sqrt(D)). models/sparo.py
explains why this equals attention in its usual form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .readout import ReadOut


class _AttendPoolProject(torch.autograd.Function):
    """Scores, softmax, pooling and value projection with a hand-written backward.

    Autograd would hold two gradients of the tokens and two of K at once and copy between layouts. Here, the matrix
    product that computes a second contribution also adds it (less peak memory and a third of the time, see
    benchmarks/readout.py).

    Shapes: tokens (B, N, d); query (H, G, D), scaled; key (H, D, d); value likewise, None if it is the key;
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
        # Inputs were cast before; another cast inside would copy them.
        with torch.autocast(tokens.device.type, enabled=False):
            read, attention, weight, pooled = _attend(tokens, query, key, value, constant, keep)
        ctx.save_for_backward(tokens, query, key, value, constant, keep, weight, attention, pooled)
        ctx.set_materialize_grads(False)  # attention maps are rarely differentiated
        return read, attention

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        d_read, d_attention = grad_outputs
        tokens, query, key, value, constant, keep, weight, attention, pooled = ctx.saved_tensors
        if d_read is None:
            d_read = pooled.new_zeros(*pooled.shape[:-1], query.shape[-1])
        # A loop that calls backward inside its autocast block would cast each product again, and some to another dtype.
        with torch.autocast(tokens.device.type, enabled=False):
            # With create_graph=True, for second derivatives. The saved products have no graph.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                return _differentiable_gradients(d_read, d_attention, (tokens, query, key, value, constant), keep)
            with_constant = constant is not None
            return _gradients(d_read, d_attention, tokens, query, key, value, weight, attention, pooled, with_constant)


def _attend(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor | None, constant: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return read (H, B*G, D), attention (B, L, N), w_l (L, d) and p_l (H, B*G, d)."""
    heads, group, _ = query.shape
    # The keys of all tokens are never computed; d values per slot replace them.
    weight = torch.bmm(query, key).flatten(0, 1)
    scores = weight @ tokens.transpose(1, 2)
    if constant is not None:
        scores = scores + constant.to(scores.dtype)[:, None]
    if keep is not None:
        # In place, because later steps do not need the scores.
        scores = scores.masked_fill_(~keep[:, None, :], -torch.inf)
    # In fp32 at least, because sums of exponentials in 16 bits lose small terms.
    attention = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    pooled = _by_head(attention @ tokens, heads, group)
    return torch.bmm(pooled, (key if value is None else value).transpose(1, 2)), attention, weight, pooled


def _differentiable_gradients(
    d_read: Tensor, d_attention: Tensor | None, inputs: tuple[Tensor | None, ...], keep: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return what `_gradients` returns, computed by autograd, so that it can be differentiated again."""
    tokens, query, key, value, constant = inputs
    assert tokens is not None and query is not None and key is not None
    read, attention, _, _ = _attend(tokens, query, key, value, constant, keep)
    outputs, gradients = [read], [d_read]
    if d_attention is not None:
        outputs, gradients = [read, attention], [d_read, d_attention]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True))
    return (*(next(found) if x is not None and x.requires_grad else None for x in inputs), None)


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
    """Return the gradients of tokens, query, key, value, constant and keep; None for those without one."""
    heads, group, _ = query.shape
    # The gradient of V is the transpose of the forward's product.
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
    # Softmax backward, from the saved attention map.
    d_scores = attention * (d_scores - (attention * d_scores).sum(-1, keepdim=True))
    d_tokens = torch.bmm(attention.transpose(1, 2), d_pooled)
    # The product adds to the gradient, so a second gradient of the tokens is never stored.
    d_tokens.baddbmm_(d_scores.transpose(1, 2), weight.expand(len(tokens), -1, -1))
    # Over batch and tokens at once: one product instead of B products that are summed.
    d_weight = (d_scores.transpose(0, 1).flatten(1) @ tokens.flatten(0, 1)).view(heads, group, -1)
    d_query = torch.bmm(d_weight, key.transpose(1, 2))
    if value is None:  # both gradients of K in one buffer
        d_key, d_value = d_value.baddbmm_(query.transpose(1, 2), d_weight), None
    else:
        d_key = torch.bmm(query.transpose(1, 2), d_weight)
    # The bias of the key shifts all scores of a slot alike, so its gradient is zero up to rounding, but it must exist.
    d_constant = d_scores.sum((0, 2)) if with_constant else None
    return d_tokens, d_query, d_key, d_value, d_constant, None


def _by_head(x: Tensor, heads: int, group: int) -> Tensor:
    """Rearrange (B, L, d) to (H, B*G, d)."""
    return x.view(x.shape[0], heads, group, x.shape[-1]).transpose(0, 1).flatten(1, 2)


class SeparateHeads(ReadOut):
    """L heads of D values over tokens of width d. Subclasses define what follows and call `reset_heads`.

    Parameters have the names and shapes of the sparo-clip repository: `q_emb` (1, L/grp, grp, 1, D), `k.weight`
    (L/grp*D, d), `k.bias`, `v.*` (only without sharing).

    Args:
        dim: d, width of the tokens.
        slots: L, number of separate heads.
        head_width: D, width of queries, keys and values.
        grp_size: number of heads that share one key (and value) projection.
        share_kv: values are the keys.

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
        # Not a parameter: an alias would be saved and counted twice.
        self.v = None if share_kv else nn.Linear(dim, self.heads * head_width)

    def reset_heads(self) -> None:
        """Initialize: q ~ N(0, 1); K (and V) xavier-uniform over the whole matrix; biases zero (Appendix A)."""
        nn.init.normal_(self.q_emb)
        for linear in (self.k, self.v):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def attend(self, tokens: Tensor, keep: Tensor | None, map_slots: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return the heads' output (B, L, D) for tokens (B, N, d), through `map_slots` if given, and attention (B, L, N) in the computed dtype.

        Args:
            tokens: the tokens.
            keep: (B, N) bool, True for positions that may be attended; None: all. Every row needs at least one True.
            map_slots: maps the D values of every head to others.
        """
        values = self.v or self.k
        device = tokens.device.type
        # Autocast does not apply inside, so inputs are cast once here.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.k.weight.dtype
        # Scale L * D values once instead of every score.
        query = (self.q_emb * self.scale).view(self.heads, self.grp_size, self.head_width)
        key = self.k.weight.view(self.heads, self.head_width, self.dim)
        value = None if self.v is None else self.v.weight.view(self.heads, self.head_width, self.dim).to(dtype)
        # With separate values, the key bias would get no gradient; as a constant per slot, it gets a zero gradient.
        constant = None if self.v is None else torch.bmm(query, self.k.bias.view(self.heads, -1, 1)).flatten()
        inputs = (tokens.to(dtype), query.to(dtype), key.to(dtype), value, constant, keep)
        # Programs that torch.export writes have no gradient.
        exported = torch.compiler.is_exporting()
        read, attention = _attend(*inputs)[:2] if exported else _AttendPoolProject.apply(*inputs)
        read = read + values.bias.view(self.heads, 1, self.head_width).to(dtype)
        read = (
            read if map_slots is None else map_slots(read)
        )  # before the copy below, because it usually reduces the number of values
        return read.view(self.heads, -1, self.grp_size, read.shape[-1]).transpose(0, 1).flatten(1, 2), attention

    def attend_plain(self, tokens: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute `attend` as in Appendix A, with keys and values for every token and head: same parameters, same result, slower."""
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
    """Return attention maps for `Slots`: in fp32 at least, or None if not requested."""
    return attention.to(torch.promote_types(attention.dtype, torch.float32)) if need_attention else None
