"""PSB, the parallel spatiotemporal binder: slots of all times bind at once, in blocks without a loop over time (Singh et al. 2024)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .binding import Sees, Tokens, bound, chosen
from .slot_attention import ACTIVATIONS, Grouped
from .slot_config import SlotAttentionConfig


class ParallelBinder(nn.Module):
    """Features (b, T, N, in_width), or (b, N, in_width) of one time, to slots (b, T, K, D), or (b, K, D).

    Slots begin alike at all times: learned, or drawn from one learned Gaussian by `noise` (b, K, D).
    `checkpointed`: what a block writes is made again in backward.
    """

    checkpointed = False
    adamw_only_parameters = ("learned",)

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.config, c = config, config
        self.norm = nn.LayerNorm(c.width, eps=c.ln_eps)
        self.blocks = nn.ModuleList(BinderBlock(c, in_width) for _ in range(c.iterations))
        if c.init == "learned":
            self.learned = nn.Parameter(nn.init.trunc_normal_(torch.empty(c.slots, c.width)))
        else:
            # Keras' bound for (1, D), as slots that take turns begin.
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
        # The deviation as its logarithm: it stays positive whatever the optimizer does.
        return self.mu + self.log_sigma.exp() * noise

    def standardised(self, tokens: Tensor) -> Tokens:
        """With what brings them to mean 0 and variance 1, once for all blocks: what each block's norm does beyond it is its own."""
        return Tokens.of(tokens, self.config.ln_eps)

    def forward(self, features: Tensor, noise: Tensor | None = None) -> Grouped:
        """`attention`: what slots took of the tokens of their own time in the last block, all heads together."""
        alone = features.ndim == 3
        tokens = features[:, None] if alone else features
        count, times = tokens.shape[:2]
        seen = self.standardised(tokens)
        slots = self.norm(self.first(noise, count))[:, None].expand(-1, times, -1, -1)
        attention = slots
        for number, block in enumerate(self.blocks):
            given = slots, seen, number == 0, number == len(self.blocks) - 1
            if self.checkpointed and torch.is_grad_enabled():
                slots, attention, x = checkpoint(block, *given, use_reentrant=False)  # type: ignore[misc]
            else:
                slots, attention, x = block(*given)
            seen = seen._replace(x=x)
        # A still image is a clip of one time: one code path, so one set of tests.
        return Grouped(slots[:, 0], attention[:, 0]) if alone else Grouped(slots, attention)


class BinderBlock(nn.Module):
    """Slots (b, T, K, D) and standardised tokens (b, T, N, in_width) to the next slots, attention (b, T, K, N), and the tokens for the
    next block. All branches are pre-norm."""

    def __init__(self, c: SlotAttentionConfig, in_width: int):
        super().__init__()
        assert c.binder is not None
        self.config, self.binder, wide = c, c.binder, c.width
        # Branches shrink with depth, so that what is added up over all blocks begins with the size of one.
        gain = (4 * c.iterations) ** -0.5
        self.norm_slots, self.norm_time, self.norm_mlp = (nn.LayerNorm(wide, eps=c.ln_eps) for _ in range(3))
        self.norm_input = nn.LayerNorm(in_width, eps=c.ln_eps)
        self.to_q, self.out = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(in_width, wide, bias=False) for _ in range(2))
        self.across_time = SlotHeads(wide, self.binder.heads, gain)
        if self.binder.interaction == "decoupled":
            self.norm_among, self.among = nn.LayerNorm(wide, eps=c.ln_eps), SlotHeads(wide, self.binder.heads, gain)
        self.mlp = nn.Sequential(
            nn.Linear(wide, c.mlp_width), ACTIVATIONS[c.activation](), nn.Linear(c.mlp_width, wide)
        )
        hidden = self.binder.distance_width
        # Biases by distance in time, of the heads to tokens and of those across time; then the logarithms of weights.
        told = c.heads + self.binder.heads + (c.heads if self.binder.fades else 0)
        self.distance = nn.Sequential(nn.Linear(2 * self.binder.octaves, hidden), nn.GELU(), nn.Linear(hidden, told))
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
        self, slots: Tensor, tokens: Tokens, alike: bool = False, with_attention: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """
        Args:
            alike: slots are the same at all times.  with_attention: give it, too; None otherwise.
        """
        times, w = slots.shape[1], self.binder.window
        apart = torch.arange(times, device=slots.device)
        apart = apart[None] - apart[:, None]  # (time of a slot, time of what it sees)
        seen = (
            (apart <= 0) & (apart > -(w or times)) if self.binder.causal else torch.ones_like(apart, dtype=torch.bool)
        )
        bias, among, fading = self.biases(apart).tensor_split(
            (self.config.heads, self.config.heads + self.binder.heads)
        )
        # Minus infinity, of which every row keeps at least its own time: no softmax of nothing.
        among = among.masked_fill(~seen, -math.inf)
        update, attention, x = self._bound(self.norm_slots(slots), tokens, bias, fading, alike, with_attention)
        slots = slots + update
        if self.binder.interaction == "joint":
            k = slots.shape[2]
            among = among.repeat_interleave(k, 1).repeat_interleave(k, 2)
            slots = slots + self.across_time(self.norm_time(slots).flatten(1, 2), among).view(slots.shape)
        else:
            slots = slots + self.across_time(self.norm_time(slots).transpose(1, 2), among).transpose(1, 2)
        return self.rest(slots), attention, x

    def rest(self, slots: Tensor) -> Tensor:
        """What happens among the slots of a time."""
        if self.binder.interaction == "decoupled":
            slots = slots + self.among(self.norm_among(slots), None)
        return slots + self.mlp(self.norm_mlp(slots))

    def _bound(
        self, slots: Tensor, tokens: Tokens, bias: Tensor, fading: Tensor, alike: bool, with_attention: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Attention of normed slots to tokens of all times that they see."""
        c, binder = self.config, self.binder
        queries, offset = self.queries(slots)
        # What one head adds to all who compete for a token of one time changes no share; else it weighs them.
        matters = c.heads > 1 or binder.competes == "clip" or not binder.inverted
        added = bias.permute(1, 2, 0).repeat_interleave(c.slots, -1) if matters else None
        weight = fading.exp().permute(1, 2, 0).repeat_interleave(c.slots, -1) if binder.fades else None
        sees: Sees = "earlier" if binder.causal else "all"
        if not binder.inverted:
            found = chosen(queries, tokens.x, c.ln_eps, added, sees, binder.window, with_attention)
            return self.values(found.taken, found.total), self._of_all_heads(found.own), found.x
        if alike and added is None:
            # Equal queries take the same of a frame at all times: each frame once, and sums over the times that see it.
            alone = Tokens(*(table.flatten(0, 1)[:, None] for table in tokens))
            taken, total, own, x = bound(
                queries.flatten(0, 1)[:, None],
                offset.flatten(0, 1)[:, None],
                alone,
                None,
                "all",
                with_own=with_attention,
            )
            shape = tokens.mean.shape[:2]
            taken, total = (self._summed(table.view(*shape, *table.shape[2:]), weight) for table in (taken, total))
            own = None if own is None else own.view(*shape, *own.shape[2:])
            x = x.view_as(tokens.x)
        else:
            taken, total, own, x = bound(
                queries, offset, tokens, added, sees, binder.competes, binder.window, with_attention, weight
            )
        return self.values(taken, total), self._of_all_heads(own), x

    def _of_all_heads(self, own: Tensor | None) -> Tensor | None:
        return None if own is None else own.unflatten(2, (self.config.heads, -1)).sum(2)

    def queries(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(b, T, H * K, in_width) for standardised tokens z, and what is added to all logits of a row (b, T, H * K).

        q (W_k (g z + o)) = (q W_k g) z + q W_k o: neither the keys' weights nor the norm's own touch the long side.
        """
        heads = self.config.heads
        q = self.to_q(slots).unflatten(-1, (heads, -1)).transpose(2, 3)
        q = q * q.shape[-1] ** -0.5
        q = torch.einsum("bthkd,hdi->bthki", q, self.to_k.weight.unflatten(0, (heads, -1)).to(q.dtype)).flatten(2, 3)
        # In the bias's own type: under autocast queries are 16 bits, and this is added to all logits.
        return q * self.norm_input.weight, q.to(self.norm_input.bias.dtype) @ self.norm_input.bias

    def values(self, taken: Tensor, total: Tensor) -> Tensor:
        """Sums of standardised tokens (b, T, H * K, in_width) and of shares to the values of their means: (b, T, K, D)."""
        # What every head took is a mean, or slots that took much of a frame would grow with it.
        heads, norm = self.config.heads, self.norm_input
        eps = self.config.renorm_eps if self.binder.inverted else 0.0  # what slots choose sums to one as it is
        means = (taken * norm.weight + total[..., None] * norm.bias) / (total + eps)[..., None]
        means = means.unflatten(2, (heads, -1)).to(self.to_v.weight.dtype)
        values = torch.einsum("bthki,hdi->btkhd", means, self.to_v.weight.unflatten(0, (heads, -1)))
        return self.out(values.flatten(-2))

    def _summed(self, table: Tensor, weight: Tensor | None) -> Tensor:
        """Of each frame's own (b, T, R, …) the sums over the times that a time sees; by weights (T, T, R) of those."""
        if weight is not None:
            seen = torch.ones(weight.shape[:2], device=weight.device, dtype=weight.dtype)
            if self.binder.causal:
                seen = seen.tril() if self.binder.window is None else seen.tril().triu(1 - self.binder.window)
            return torch.einsum("tsr,bsr...->btr...", (weight * seen[..., None]).to(table.dtype), table)
        if not self.binder.causal:
            return table.sum(1, keepdim=True).expand_as(table)
        sums, w = table.cumsum(1), self.binder.window
        if w is None or w >= table.shape[1]:
            return sums
        # Sums of all, less sums of what left the window: two running sums for any length of it.
        return sums - F.pad(sums[:, :-w].movedim(1, -1), (w, 0)).movedim(-1, 1)

    def biases(self, apart: Tensor) -> Tensor:
        """Biases (heads, …) of how far from a slot's time what it sees is."""
        b, dtype = self.binder, next(self.distance.parameters()).dtype
        # In fp32 at least: sines of a thousand in 16 bits are noise.
        exact = torch.promote_types(dtype, torch.float32)
        period = 2.0 * b.longest - 1
        octaves = 2.0 ** torch.arange(b.octaves, device=apart.device, dtype=exact)
        angles = apart[..., None].to(exact) * (octaves * 2 * math.pi / period)
        table = 2**0.5 * torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.distance(table.to(dtype)).movedim(-1, 0)


class SlotHeads(nn.Module):
    """Self-attention over the last but one dimension of (…, n, D), with biases (heads, n, n) added to its scores; `last`: of the last
    row alone, (…, 1, D), and its biases (heads, 1, n)."""

    def __init__(self, width: int, heads: int, gain: float):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        for layer in (self.to_q, self.to_k, self.to_v):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.xavier_uniform_(self.out.weight, gain)

    def forward(self, x: Tensor, bias: Tensor | None, last: bool = False) -> Tensor:
        asking = x[..., -1:, :] if last else x
        q, k, v = (
            # Only the newest time asks in a stream; all of them answer.
            layer(rows).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer, rows in ((self.to_q, asking), (self.to_k, x), (self.to_v, x))
        )
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))
        return self.out(found.transpose(-2, -3).flatten(-2))
