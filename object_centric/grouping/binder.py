"""PSB, the parallel spatiotemporal binder: slots of all times bind at once, in blocks without a loop over time (Singh et al. 2024)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .slot_attention import ACTIVATIONS, Grouped
from .slot_config import SlotAttentionConfig


class ParallelBinder(nn.Module):
    """Features (b, T, N, in_width), or (b, N, in_width) of one time, to slots (b, T, K, D), or (b, K, D).

    Slots begin alike at all times: learned, or drawn from one learned Gaussian by `noise` (b, K, D).
    `checkpointed`: what a block writes is made again in backward.
    """

    checkpointed = False

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.config, c = config, config
        self.norm = nn.LayerNorm(c.width, eps=c.ln_eps)
        self.blocks = nn.ModuleList(BinderBlock(c, in_width) for _ in range(c.iterations))
        if c.init == "learned":
            self.learned = nn.Parameter(nn.init.trunc_normal_(torch.empty(c.slots, c.width)))
        else:
            limit = (6 / (1 + c.width)) ** 0.5
            self.mu, self.log_sigma = (nn.Parameter(torch.empty(c.width).uniform_(-limit, limit)) for _ in range(2))

    def units(self) -> list[nn.Module]:
        """What an engine wraps one by one."""
        return list(self.blocks)

    def first(self, noise: Tensor | None, count: int) -> Tensor:
        """(b, K, D). Raises `ValueError` where slots are drawn and no noise was given."""
        c = self.config
        if c.init == "learned":
            return self.learned.expand(count, -1, -1)
        if noise is None:
            raise ValueError(f"slots begin at random: give noise (b, {c.slots}, {c.width})")
        return self.mu + self.log_sigma.exp() * noise

    def forward(self, features: Tensor, noise: Tensor | None = None) -> Grouped:
        """`attention`: what slots took of the tokens of their own time in the last block, all heads together."""
        alone = features.ndim == 3
        tokens = features[:, None] if alone else features
        count, times = tokens.shape[:2]
        slots = self.norm(self.first(noise, count))[:, None].expand(-1, times, -1, -1)
        attention = slots
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                slots, attention = checkpoint(block, slots, tokens, use_reentrant=False)  # type: ignore[misc]
            else:
                slots, attention = block(slots, tokens)
        return Grouped(slots[:, 0], attention[:, 0]) if alone else Grouped(slots, attention)


class BinderBlock(nn.Module):
    """Slots (b, T, K, D) and tokens (b, T, N, in_width) to the next slots, and attention (b, T, K, N). All branches are pre-norm."""

    def __init__(self, c: SlotAttentionConfig, in_width: int):
        super().__init__()
        assert c.binder is not None
        self.config, self.binder, wide = c, c.binder, c.width
        gain = (4 * c.iterations) ** -0.5
        self.norm_slots, self.norm_time, self.norm_among, self.norm_mlp = (
            nn.LayerNorm(wide, eps=c.ln_eps) for _ in range(4)
        )
        self.norm_input = nn.LayerNorm(in_width, eps=c.ln_eps)
        self.to_q, self.out = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(in_width, wide, bias=False) for _ in range(2))
        self.across_time, self.among = (SlotHeads(wide, self.binder.heads, gain) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(wide, c.mlp_width), ACTIVATIONS[c.activation](), nn.Linear(c.mlp_width, wide)
        )
        hidden = self.binder.distance_width
        # Biases by distance in time, of the heads to tokens and of those across time.
        self.distance = nn.Sequential(
            nn.Linear(2 * self.binder.octaves, hidden), nn.GELU(), nn.Linear(hidden, c.heads + self.binder.heads)
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

    def forward(self, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        times = slots.shape[1]
        seen = torch.ones(times, times, dtype=torch.bool, device=slots.device)  # (time of a slot, time of what it sees)
        seen = seen.tril() if self.binder.causal else seen
        bias = self._distances(times, slots)
        update, attention = self._bound(
            self.norm_slots(slots), self.norm_input(tokens), bias[: self.config.heads], seen
        )
        slots = slots + update
        among_times = bias[self.config.heads :].masked_fill(~seen, -math.inf)
        slots = slots + self.across_time(self.norm_time(slots).transpose(1, 2), among_times).transpose(1, 2)
        slots = slots + self.among(self.norm_among(slots), None)
        return slots + self.mlp(self.norm_mlp(slots)), attention

    def _bound(self, slots: Tensor, tokens: Tensor, bias: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Inverted attention of normed slots to normed tokens of all times that they see."""
        c, heads = self.config, self.config.heads
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1))
            for layer, x in ((self.to_q, slots), (self.to_k, tokens), (self.to_v, tokens))
        )
        logits = torch.einsum("btkhd,bsnhd->bhtksn", q * q.shape[-1] ** -0.5, k)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits + bias[:, :, None, :, None]
        there = seen[:, None, :, None]
        if self.binder.competes == "time":
            # A mask is the same for all who compete, so it need not come before the softmax, where whole rows of it are no numbers.
            shares = F.softmax(logits.movedim(2, 1).flatten(2, 3), dim=2).unflatten(2, (heads, -1)).movedim(1, 2)
        else:
            shares = F.softmax(logits.masked_fill(~there, -math.inf).flatten(1, 3), dim=1).view(logits.shape)
        shares = shares * there
        weights = shares / (shares.sum((-2, -1), keepdim=True) + c.renorm_eps)
        update = self.out(torch.einsum("bhtksn,bsnhd->btkhd", weights.to(v.dtype), v).flatten(-2))
        return update, shares.sum(1).diagonal(dim1=1, dim2=3).movedim(-1, 1)

    def _distances(self, times: int, like: Tensor) -> Tensor:
        """Biases (heads, T, T) of how far from a slot's time what it sees is."""
        b = self.binder
        at = torch.arange(times, device=like.device)
        period = 2.0 * b.longest - 1
        angles = (at[None] - at[:, None])[..., None] * (
            2.0 ** torch.arange(b.octaves, device=like.device) * 2 * math.pi / period
        )
        table = 2**0.5 * torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.distance(table.to(next(self.distance.parameters()).dtype)).permute(2, 0, 1)


class SlotHeads(nn.Module):
    """Self-attention over the last but one dimension of (…, n, D), with biases (heads, n, n) added to its scores."""

    def __init__(self, width: int, heads: int, gain: float):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        for layer in (self.to_q, self.to_k, self.to_v):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.xavier_uniform_(self.out.weight, gain)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for layer in (self.to_q, self.to_k, self.to_v)
        )
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))
        return self.out(found.transpose(-2, -3).flatten(-2))
