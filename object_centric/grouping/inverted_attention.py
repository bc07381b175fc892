"""A binder's attention to tokens: inverted (slots compete for a token) or ordinary."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .frame_attention import AttentionScope, FrameAttention


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
            # 16-bit tokens one frame at a time, because fp32 statistics would copy the whole clip at once.
            parts = [x.detach()] if x.dtype == exact else x.detach().split(1, 1)
            statistics = [torch.native_layer_norm(p.to(exact), p.shape[-1:], None, None, eps)[1:] for p in parts]
        return cls(x, *(torch.cat(column, 1).squeeze(-1) for column in zip(*statistics, strict=True)))


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
        weighted_sum, total, attention, next_x = FrameAttention.apply(
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
