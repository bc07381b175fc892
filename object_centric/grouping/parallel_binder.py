"""PSB, the parallel spatiotemporal binder: slots of all times bind at once, in blocks without a loop over time (Singh et al. 2024)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .inverted_attention import AttentionScope, Tokens, inverted_attention, softmax_attention
from .slot_attention import ACTIVATIONS, GroupingOutput
from .slot_config import SlotAttentionConfig


class ParallelBinder(nn.Module):
    """Grouping of features (b, T, N, in_width), or (b, N, in_width) for one time, to slots (b, T, K, D), or (b, K, D).

    Slots start equal at all times: learned, or sampled from one learned Gaussian with `noise` (b, K, D). With
    `checkpointed`, backward recomputes each block.
    """

    checkpointed = False
    adamw_only_parameters = ("initial_slots",)

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.config, c = config, config
        self.norm = nn.LayerNorm(c.width, eps=c.ln_eps)
        self.blocks = nn.ModuleList(BinderBlock(c, in_width) for _ in range(c.iterations))
        if c.slot_init == "learned":
            self.initial_slots = nn.Parameter(nn.init.trunc_normal_(torch.empty(c.slots, c.width)))
        else:
            # Keras' bound for (1, D), as for recurrent slots.
            limit = (6 / (1 + c.width)) ** 0.5
            self.mu, self.log_sigma = (nn.Parameter(torch.empty(c.width).uniform_(-limit, limit)) for _ in range(2))

    def units(self) -> list[nn.Module]:
        """Return the modules that an engine wraps one by one."""
        return list(self.blocks)

    def init_slots(self, noise: Tensor | None, count: int) -> Tensor:
        """Return initial slots (b, K, D). Raises `ValueError` if they are sampled and no noise was given."""
        c = self.config
        if c.slot_init == "learned":
            return self.initial_slots.expand(count, -1, -1)
        if noise is None:
            raise ValueError(
                f"noise: is required because slots are initialized at random, got None. Pass random numbers of shape (b, {c.slots}, {c.width})."
            )
        # The deviation is stored as its logarithm, so it stays positive whatever the optimizer does.
        return self.mu + self.log_sigma.exp() * noise

    def standardize(self, tokens: Tensor) -> Tokens:
        """Compute the statistics for mean 0 and variance 1, once for all blocks; each block's norm only adds its own affine map."""
        return Tokens.with_statistics(tokens, self.config.ln_eps)

    def forward(self, features: Tensor, noise: Tensor | None = None) -> GroupingOutput:
        """Return slots, and as `attention` the weights of the tokens of each time in the last block, summed over heads."""
        is_image = features.ndim == 3
        tokens = features[:, None] if is_image else features
        count, times = tokens.shape[:2]
        key_tokens = self.standardize(tokens)
        slots = self.norm(self.init_slots(noise, count))[:, None].expand(-1, times, -1, -1)
        attention = slots
        for number, block in enumerate(self.blocks):
            block_inputs = slots, key_tokens, number == 0, number == len(self.blocks) - 1
            if self.checkpointed and torch.is_grad_enabled():
                slots, attention, x = checkpoint(block, *block_inputs, use_reentrant=False)  # type: ignore[misc]
            else:
                slots, attention, x = block(*block_inputs)
            key_tokens = key_tokens._replace(x=x)
        # A still image is a clip of one time, so there is one code path.
        return GroupingOutput(slots[:, 0], attention[:, 0]) if is_image else GroupingOutput(slots, attention)


class BinderBlock(nn.Module):
    """Block that returns the next slots (b, T, K, D), attention (b, T, K, N), and the tokens for the next block. All branches are pre-norm."""

    def __init__(self, c: SlotAttentionConfig, in_width: int):
        super().__init__()
        assert c.binder is not None
        self.config, self.binder, wide = c, c.binder, c.width
        # Scale branches by depth, so that the sum over all blocks starts with the size of one.
        gain = (4 * c.iterations) ** -0.5
        self.norm_slots, self.norm_time, self.norm_mlp = (nn.LayerNorm(wide, eps=c.ln_eps) for _ in range(3))
        self.norm_input = nn.LayerNorm(in_width, eps=c.ln_eps)
        self.to_q, self.out = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(in_width, wide, bias=False) for _ in range(2))
        self.across_time = SlotSelfAttention(wide, self.binder.heads, gain)
        if self.binder.interaction == "decoupled":
            self.norm_self_attention, self.self_attention = (
                nn.LayerNorm(wide, eps=c.ln_eps),
                SlotSelfAttention(wide, self.binder.heads, gain),
            )
        self.mlp = nn.Sequential(
            nn.Linear(wide, c.mlp_width), ACTIVATIONS[c.activation](), nn.Linear(c.mlp_width, wide)
        )
        hidden = self.binder.distance_width
        # Biases by temporal distance, for the heads of attention to tokens and for those across time; then the
        # logarithms of weights.
        num_outputs = c.heads + self.binder.heads + (c.heads if self.binder.temporal_decay else 0)
        self.distance = nn.Sequential(
            nn.Linear(2 * self.binder.fourier_bands, hidden), nn.GELU(), nn.Linear(hidden, num_outputs)
        )
        for layer in (self.to_q, self.to_k, self.to_v):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.xavier_uniform_(self.out.weight, gain)
        for sequence, last in ((self.mlp, gain), (self.distance, 1.0)):
            first: Any = sequence[0]
            second: Any = sequence[2]
            nn.init.kaiming_uniform_(first.weight, nonlinearity="relu")
            nn.init.xavier_uniform_(second.weight, last)
            nn.init.zeros_(first.bias)
            nn.init.zeros_(second.bias)

    def forward(
        self, slots: Tensor, tokens: Tokens, shared_slots: bool = False, with_attention: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Update slots.

        Args:
            slots: (b, T, K, D).
            tokens: standardised tokens (b, T, N, in_width).
            shared_slots: slots are the same at all times.
            with_attention: also return attention; None otherwise.
        """
        times, w = slots.shape[1], self.binder.context_frames
        time_offsets = torch.arange(times, device=slots.device)
        time_offsets = time_offsets[None] - time_offsets[:, None]  # (time of a slot, time that it sees)
        visible = (
            (time_offsets <= 0) & (time_offsets > -(w or times))
            if self.binder.causal
            else torch.ones_like(time_offsets, dtype=torch.bool)
        )
        bias, temporal_bias, log_decay = self.biases(time_offsets).tensor_split(
            (self.config.heads, self.config.heads + self.binder.heads)
        )
        # Minus infinity, but every row keeps at least its own time, so no softmax is empty.
        temporal_bias = temporal_bias.masked_fill(~visible, -math.inf)
        update, attention, x = self._attend(
            self.norm_slots(slots), tokens, bias, log_decay, shared_slots, with_attention
        )
        slots = slots + update
        if self.binder.interaction == "joint":
            k = slots.shape[2]
            temporal_bias = temporal_bias.repeat_interleave(k, 1).repeat_interleave(k, 2)
            slots = slots + self.across_time(self.norm_time(slots).flatten(1, 2), temporal_bias).view(slots.shape)
        else:
            slots = slots + self.across_time(self.norm_time(slots).transpose(1, 2), temporal_bias).transpose(1, 2)
        return self.mix_slots(slots), attention, x

    def mix_slots(self, slots: Tensor) -> Tensor:
        """Apply self-attention and the MLP among the slots of a time."""
        if self.binder.interaction == "decoupled":
            slots = slots + self.self_attention(self.norm_self_attention(slots), None)
        return slots + self.mlp(self.norm_mlp(slots))

    def _attend(
        self, slots: Tensor, tokens: Tokens, bias: Tensor, log_decay: Tensor, shared_slots: bool, with_attention: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Attend with normed slots to the tokens of all times that they see."""
        c, binder = self.config, self.binder
        queries, offset = self.queries(slots)
        # With one head, a common bias of all that compete for a token of one time changes no weight; otherwise it does.
        bias_matters = c.heads > 1 or binder.softmax_scope == "clip" or not binder.inverted
        slot_bias = bias.permute(1, 2, 0).repeat_interleave(c.slots, -1) if bias_matters else None
        weight = log_decay.exp().permute(1, 2, 0).repeat_interleave(c.slots, -1) if binder.temporal_decay else None
        scope: AttentionScope = "earlier" if binder.causal else "all"
        if not binder.inverted:
            sums = softmax_attention(
                queries, tokens.x, c.ln_eps, slot_bias, scope, binder.context_frames, with_attention
            )
            return self.values(sums.weighted_sum, sums.total), self._sum_over_heads(sums.attention), sums.x
        if shared_slots and slot_bias is None:
            # Equal queries read the same from a frame at all times: process each frame once, then sum over the frames
            # that a time sees.
            frame_tokens = Tokens(*(table.flatten(0, 1)[:, None] for table in tokens))
            weighted_sum, total, attention, x = inverted_attention(
                queries.flatten(0, 1)[:, None],
                offset.flatten(0, 1)[:, None],
                frame_tokens,
                None,
                "all",
                with_attention=with_attention,
            )
            shape = tokens.mean.shape[:2]
            weighted_sum, total = (
                self._sum_visible_frames(table.view(*shape, *table.shape[2:]), weight)
                for table in (weighted_sum, total)
            )
            attention = None if attention is None else attention.view(*shape, *attention.shape[2:])
            x = x.view_as(tokens.x)
        else:
            weighted_sum, total, attention, x = inverted_attention(
                queries,
                offset,
                tokens,
                slot_bias,
                scope,
                binder.softmax_scope,
                binder.context_frames,
                with_attention,
                weight,
            )
        return self.values(weighted_sum, total), self._sum_over_heads(attention), x

    def _sum_over_heads(self, attention: Tensor | None) -> Tensor | None:
        return None if attention is None else attention.unflatten(2, (self.config.heads, -1)).sum(2)

    def queries(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (b, T, H * K, in_width) for standardised tokens z, and offsets of all logits of a row (b, T, H * K).

        q (W_k (g z + o)) = (q W_k g) z + q W_k o: neither the weights of keys nor those of the norm touch the tokens.
        """
        heads = self.config.heads
        q = self.to_q(slots).unflatten(-1, (heads, -1)).transpose(2, 3)
        q = q * q.shape[-1] ** -0.5
        q = torch.einsum("bthkd,hdi->bthki", q, self.to_k.weight.unflatten(0, (heads, -1)).to(q.dtype)).flatten(2, 3)
        # In the bias's own dtype: under autocast, queries have 16 bits, and this is added to all logits.
        return q * self.norm_input.weight, q.to(self.norm_input.bias.dtype) @ self.norm_input.bias

    def values(self, weighted_sum: Tensor, total: Tensor) -> Tensor:
        """Return the values (b, T, K, D) from sums of standardised tokens (b, T, H * K, in_width) and sums of weights."""
        # Use the mean of each head, because slots that receive much of a frame would grow otherwise.
        heads, norm = self.config.heads, self.norm_input
        eps = (
            self.config.renorm_eps if self.binder.inverted else 0.0
        )  # weights of ordinary attention sum to one already
        means = (weighted_sum * norm.weight + total[..., None] * norm.bias) / (total + eps)[..., None]
        means = means.unflatten(2, (heads, -1)).to(self.to_v.weight.dtype)
        values = torch.einsum("bthki,hdi->btkhd", means, self.to_v.weight.unflatten(0, (heads, -1)))
        return self.out(values.flatten(-2))

    def _sum_visible_frames(self, frame_values: Tensor, weight: Tensor | None) -> Tensor:
        """Sum each frame's values (b, T, R, …) over the frames that a time sees, with weights (T, T, R)."""
        if weight is not None:
            visible = torch.ones(weight.shape[:2], device=weight.device, dtype=weight.dtype)
            if self.binder.causal:
                visible = (
                    visible.tril()
                    if self.binder.context_frames is None
                    else visible.tril().triu(1 - self.binder.context_frames)
                )
            return torch.einsum(
                "tsr,bsr...->btr...", (weight * visible[..., None]).to(frame_values.dtype), frame_values
            )
        if not self.binder.causal:
            return frame_values.sum(1, keepdim=True).expand_as(frame_values)
        sums, w = frame_values.cumsum(1), self.binder.context_frames
        if w is None or w >= frame_values.shape[1]:
            return sums
        # The sum of all, minus the sum of what left the window: two running sums for any window.
        return sums - F.pad(sums[:, :-w].movedim(1, -1), (w, 0)).movedim(-1, 1)

    def biases(self, time_offsets: Tensor) -> Tensor:
        """Return biases (heads, …) by temporal distance."""
        b, dtype = self.binder, next(self.distance.parameters()).dtype
        # In fp32 at least, because sines of large numbers in 16 bits are noise.
        exact = torch.promote_types(dtype, torch.float32)
        period = 2.0 * b.max_time_distance - 1
        octaves = 2.0 ** torch.arange(b.fourier_bands, device=time_offsets.device, dtype=exact)
        angles = time_offsets[..., None].to(exact) * (octaves * 2 * math.pi / period)
        table = 2**0.5 * torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.distance(table.to(dtype)).movedim(-1, 0)


class SlotSelfAttention(nn.Module):
    """Self-attention over the last but one dimension of (…, n, D), with biases (heads, n, n).

    With `last`, only the last row is computed, (…, 1, D), with biases (heads, 1, n).
    """

    def __init__(self, width: int, heads: int, gain: float):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        for layer in (self.to_q, self.to_k, self.to_v):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.xavier_uniform_(self.out.weight, gain)

    def forward(self, x: Tensor, bias: Tensor | None, last: bool = False) -> Tensor:
        query_input = x[..., -1:, :] if last else x
        q, k, v = (
            # In a stream, only the newest time has queries; all times have keys.
            layer(rows).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer, rows in ((self.to_q, query_input), (self.to_k, x), (self.to_v, x))
        )
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))
        return self.out(output.transpose(-2, -3).flatten(-2))
