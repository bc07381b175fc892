"""Slot attention (Locatello et al. 2020, Algorithm 1): slots compete for the tokens of an image and are updated by a GRU and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.models.precision import at_least_fp32

from .slot_config import SlotAttentionConfig
from .transport import Transport

GruKind = Literal["torch", "flax", "keras"]


class Gru(nn.Module):
    """GRU cell: input (…, W) and state (…, D) to the next state.

    Gates are in torch's order: r, z, n. `weight_ih` (3 D, W), `weight_hh` (3 D, D), `bias_ih` (3 D,); `bias_hh` (3 D,),
    or (D,) in flax, where only n has one.

    Args:
        width: D.
        input_size: W; default: D.
    """

    def __init__(self, width: int, kind: GruKind = "torch", input_size: int | None = None):
        super().__init__()
        self.width, self.kind, self.input_size = width, kind, input_size or width
        self.weight_ih, self.weight_hh = (
            nn.Parameter(torch.empty(3 * width, wide)) for wide in (self.input_size, width)
        )
        self.bias_ih = nn.Parameter(torch.zeros(3 * width))
        self.bias_hh = nn.Parameter(torch.zeros(width if kind == "flax" else 3 * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize like the chosen library."""
        if self.kind == "torch":
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -(self.width**-0.5), self.width**-0.5)
            return
        for gate in self.weight_ih.data.chunk(3):
            if self.kind == "flax":
                lecun_normal_(gate)
        if self.kind == "keras":  # one kernel for all gates: (D, 3 D)
            limit = (6 / (3 * self.width + self.input_size)) ** 0.5
            nn.init.uniform_(self.weight_ih, -limit, limit)
            nn.init.orthogonal_(self.weight_hh)
        else:
            for gate in self.weight_hh.data.chunk(3):
                nn.init.orthogonal_(gate)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        lead = h.shape
        x, h = x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1])  # one product, whatever the leading dimensions
        # In flax, only the candidate's state has a bias; in torch's layout, the other two are zero.
        bias = self.bias_hh if self.kind != "flax" else F.pad(self.bias_hh, (2 * self.width, 0))
        # Products in autocast's dtype, gates in fp32, because a slot is a sum over many iterations.
        gates_x, gates_h = F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, bias)
        xr, xz, xn = gates_x.to(h.dtype).chunk(3, dim=-1)
        hr, hz, hn = gates_h.to(h.dtype).chunk(3, dim=-1)
        z = torch.sigmoid(xz + hz)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return torch.lerp(n, h, z).view(lead)


def lecun_normal_(weight: Tensor) -> None:
    """Initialize as flax does by default: a normal truncated at two deviations, with variance 1 / fan_in."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class GroupingOutput(NamedTuple):
    """Result of grouping.

    Attributes:
        slots: (…, K, D).
        attention: (…, K, N) of the last iteration before normalization over tokens, mean over heads: which slot each
            token is assigned to.
    """

    slots: Tensor
    attention: Tensor


class SlotAttention(nn.Module):
    """Slot attention over features (…, N, in_width).

    If slots are initialized at random, the call takes standard normal `noise` (…, K, D), because a model's random
    numbers are part of the batch.

    Args:
        config: options.
        in_width: width of the features.
    """

    adamw_only_parameters = ("initial_slots",)  # queries

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.config, c = config, config
        self.norm_input = nn.LayerNorm(in_width, eps=c.ln_eps)
        self.rounds = nn.ModuleList(
            SlotAttentionIteration(c, in_width) for _ in range(c.iterations if c.layers == "own" else 1)
        )
        self.gru = _build_gru(c) if c.share_gru else None
        if c.slot_init == "gaussian":
            # Keras' glorot_uniform for (1, 1, D) uses fans D and 1; torch's own would use others.
            limit = (6 / (1 + c.width)) ** 0.5
            shape = (2, c.width) if c.ground else (c.width,)  # the background's, and those of the other slots
            self.mu, self.log_sigma = (nn.Parameter(torch.empty(shape).uniform_(-limit, limit)) for _ in range(2))
        elif c.slot_init != "given":
            self.initial_slots = nn.Parameter(torch.randn(1 if c.slot_init == "same" else c.slots, c.width))
        if c.gradient == "last" and not c.straight_through and c.slot_init != "given":
            # No gradient reaches the initial slots. Frozen, they count as such, and DDP does not wait for their
            # gradients.
            for parameter in (self.mu, self.log_sigma) if c.slot_init == "gaussian" else (self.initial_slots,):
                parameter.requires_grad_(False)

    def init_slots(self, shape: torch.Size, noise: Tensor | None) -> Tensor:
        """Return initial slots (…, K, D). Raises `ValueError` if noise or given slots are required and missing."""
        c = self.config
        if c.slot_init == "given":
            raise ValueError("slot_init=given: needs initial slots (…, K, D)")
        if c.slot_init != "gaussian":
            return self.initial_slots.expand(*shape, c.slots, c.width)
        if noise is None:
            raise ValueError(
                f"noise: is required because slots are initialized at random, got None. Pass random numbers of shape (…, {c.slots}, {c.width})."
            )
        mu, log_sigma = self.mu, self.log_sigma
        if c.ground:
            mu, log_sigma = (torch.cat([t[:1], t[1:].expand(c.slots - 1, -1)]) for t in (mu, log_sigma))
        return mu + log_sigma.exp() * noise[..., : c.width]

    def forward(
        self,
        features: Tensor,
        noise: Tensor | None = None,
        initial_slots: Tensor | None = None,
        num_iterations: int | None = None,
        keep: Tensor | None = None,
    ) -> GroupingOutput:
        """Group features (…, N, in_width).

        Args:
            features: the features.
            noise: see the class.
            initial_slots: (…, K, D), instead of the module's own initial slots.
            num_iterations: instead of the configured number; for shared weights.
            keep: (…, N) bool, tokens that slots may read; None: all. Not supported with transport.
        """
        c, lead = self.config, features.shape[:-2]
        wide = c.noise_width(features.shape[-2])
        if noise is not None and noise.shape[-2:] != (c.slots, wide):
            raise ValueError(f"noise: expected (…, {c.slots}, {wide}), got {tuple(noise.shape)}")
        slots = self.init_slots(lead, noise) if initial_slots is None else initial_slots
        # Flatten leading dimensions: images, frames and views of scenes are all samples.
        x = self.norm_input(features).reshape(-1, *features.shape[-2:])
        tie_noise = features.new_zeros(())
        if wide > c.width:
            if noise is None:
                raise ValueError(
                    f"noise: is required to break ties between slots, got None. Pass random numbers of shape (…, {c.slots}, {wide})."
                )
            tie_noise = noise[..., c.width :].reshape(-1, c.slots, wide - c.width)
        slots, attention = self._iterate(
            x,
            slots.reshape(-1, *slots.shape[-2:]),
            tie_noise,
            num_iterations or c.iterations,
            None if keep is None else keep.reshape(-1, keep.shape[-1]),
        )
        return GroupingOutput(slots.view(*lead, *slots.shape[-2:]), attention.view(*lead, *attention.shape[-2:]))

    def _iterate(
        self, x: Tensor, slots: Tensor, tie_noise: Tensor, num_iterations: int, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        c, last = self.config, num_iterations - 1
        initial_slots = slots
        attention = slots.new_zeros(())
        kv: Any = None
        for i in range(num_iterations):
            step: Any = self.rounds[i if c.layers == "own" else 0]
            skip_grad = c.gradient == "last" and i < last
            with torch.set_grad_enabled(torch.is_grad_enabled() and not skip_grad):
                if skip_grad:
                    # Without a graph, because the iterations before the last are a search for a fixed point.
                    slots = slots.detach()
                elif c.gradient == "last":
                    slots = slots.detach()
                    if c.straight_through:
                        slots = slots + initial_slots - initial_slots.detach()
                    kv = None  # was projected without a graph
                # If all iterations share weights, project keys and values once.
                if kv is None or c.layers == "own":
                    kv = step.project_kv(x, tie_noise)
                slots, attention = step(kv, slots, c.mlp_last or i < last, keep, self.gru)
        return slots, attention


class SplitByGround(nn.Module):
    """Two copies of a module: one for the first slot, and one for all others, for tables (b, K, ·)."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.ground, self.others = make(), make()

    def forward(self, *tables: Tensor) -> Tensor:
        parts = ((self.ground, slice(None, 1)), (self.others, slice(1, None)))
        return torch.cat([module(*(t[:, slots] for t in tables)) for module, slots in parts], dim=1)


def _build_gru(c: SlotAttentionConfig) -> nn.Module:
    """Return the GRU that updates slots, split if the background has its own."""
    kind, input_size = c.gru, c.width if c.out_proj else c.qkv
    assert kind != "none"
    return SplitByGround(lambda: Gru(c.width, kind, input_size)) if c.ground else Gru(c.width, kind, input_size)


class SlotAttentionIteration(nn.Module):
    """One iteration: queries, competition, weighted mean, update.

    A background slot has its own weights of queries and updates; keys and values are shared.
    """

    def __init__(self, c: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.config = c
        make_slot_module: Callable[[Callable[[], nn.Module]], nn.Module] = (
            SplitByGround if c.ground else lambda make: make()
        )
        self.norm_slots = make_slot_module(lambda: nn.LayerNorm(c.width, eps=c.ln_eps))
        self.to_q = make_slot_module(lambda: nn.Linear(c.width, c.qkv, bias=False))
        self.to_k, self.to_v = (nn.Linear(in_width, c.qkv, bias=False) for _ in range(2))
        self.out = nn.Linear(c.qkv, c.width, bias=False) if c.out_proj else nn.Identity()
        wide = c.qkv // c.heads
        self.norm_q, self.norm_k = (
            nn.LayerNorm(wide, c.ln_eps, bias=False) if c.qk_norm else nn.Identity() for _ in "qk"
        )
        self.norm_update = nn.LayerNorm(c.qkv, eps=c.ln_eps) if c.renorm == "layer" else nn.Identity()
        self.gru = None if c.gru == "none" or c.share_gru else _build_gru(c)
        if c.mlp_width:
            self.norm_mlp = make_slot_module(lambda: nn.LayerNorm(c.width, eps=c.ln_eps))
            self.mlp = make_slot_module(
                lambda: nn.Sequential(
                    nn.Linear(c.width, c.mlp_width), ACTIVATIONS[c.activation](), nn.Linear(c.mlp_width, c.width)
                )
            )
        self.transport = Transport(c.transport, in_width, c.width) if c.transport else None
        for weight in (*self.to_q.parameters(), self.to_k.weight, self.to_v.weight):
            nn.init.xavier_uniform_(weight)

    def project_kv(self, x: Tensor, tie_noise: Tensor) -> tuple[Any, Tensor]:
        """Return keys and values (b, H, N, d) of tokens (b, N, in), once for all iterations; folded: the tokens themselves."""
        if self.transport is not None:
            return self.transport.prepare_inputs(self.to_k(x), x, tie_noise, self.config.slots), x
        if self.config.folded:
            return x, x
        k, v = (layer(x).unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for layer in (self.to_k, self.to_v))
        return self.norm_k(k), v

    def forward(
        self,
        kv: tuple[Any, Tensor],
        slots: Tensor,
        with_mlp: bool,
        keep: Tensor | None = None,
        gru: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next slots (b, K, D), which read the tokens in `keep` (b, N), and attention (b, K, N); `gru` is that of all layers."""
        c = self.config
        normed = self.norm_slots(slots)
        scale = 1 if self.transport else (c.qkv // c.heads) ** -0.5
        q = self.norm_q(self.to_q(normed).unflatten(-1, (c.heads, -1))).flatten(-2) * scale
        if self.transport is not None:
            plan = self.transport(q, normed, kv[0])
            update = self.to_v(plan.to(kv[1].dtype) @ kv[1])
            attention = plan / plan.sum(1, keepdim=True).clamp(min=1e-20)
        elif c.folded:
            # q (W_k x) = (q W_k) x, and sum_n a_n (W_v x_n) = W_v sum_n a_n x_n, so tokens need no projection.
            q = q @ self.to_k.weight
            update, attention = weighted_mean(c, q[:, None], kv[0][:, None], kv[1][:, None], keep)
            update = self.to_v(update[:, 0])
        else:
            update, attention = weighted_mean(c, q.unflatten(-1, (c.heads, -1)).transpose(1, 2), *kv, keep)
            update = update.transpose(1, 2).flatten(2)
        update = self.out(self.norm_update(update))
        # videosaur passes the normalised slot to the GRU, which is another function, not a rounding difference.
        state = normed if c.gru_on_normed else slots
        gru = gru or self.gru
        slots = state + update if gru is None else gru(update, state)
        if c.mlp_width and with_mlp:
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots, attention


def weighted_mean(
    c: SlotAttentionConfig, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weighted means (b, H, K, ·) for queries (b, H, K, d), keys and values (b, H, N, ·), and attention (b, K, N).

    Tokens outside `keep` (b, N) have no weight.
    """
    logits, tokens = q @ k.transpose(-1, -2), v.shape[-2]
    if keep is None:
        a = attention_weights(c, logits)
    else:
        dropped, tokens = ~keep[:, None, None, :], keep.sum(-1, dtype=logits.dtype)[:, None, None, None]
        # Over keys, a dropped token must not share in the sum; over slots, its weights are removed afterwards.
        logits = logits.masked_fill(dropped, -torch.inf) if c.softmax_over == "keys" else logits
        a, v = attention_weights(c, logits).masked_fill(dropped, 0), v.masked_fill(dropped.transpose(-1, -2), 0)
    # If heads compete, the weights of a token sum to one over heads, so they are summed instead of averaged.
    attention = a.mean(1) if c.softmax_over != "slots_heads" else a.sum(1)
    if c.renorm in ("none", "layer"):
        return a.to(v.dtype) @ v, attention
    # Normalize after the product, on (K, d) instead of (K, N), without a copy of A + eps.
    total, weighted_sum = a.sum(-1, keepdim=True), a.to(v.dtype) @ v
    if c.renorm == "sum":
        return weighted_sum / (total + c.renorm_eps), attention
    return (weighted_sum + c.renorm_eps * v.sum(-2, keepdim=True)) / (total + c.renorm_eps * tokens), attention


def attention_weights(c: SlotAttentionConfig, logits: Tensor) -> Tensor:
    """Return weights for logits (b, H, K, N), in fp32 at least."""
    # In 16 bits, weights of thirty slots tie.
    logits = at_least_fp32(logits)
    if c.softmax_over == "slots_heads":
        return F.softmax(logits.flatten(1, 2), dim=1).view(logits.shape)
    return F.softmax(logits, dim=-1 if c.softmax_over == "keys" else 2)
