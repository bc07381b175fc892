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
    """(…, W) input and (…, D) state to the next state.

    Gates stand in torch's order: r, z, n. `weight_ih` (3 D, W), `weight_hh` (3 D, D), `bias_ih` (3 D,); `bias_hh` (3 D,), of flax (D,):
    that of n.

    Args:
        width: D.  input_size: W; default: D.
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
        """As the library of this kind begins."""
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
        x, h = x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1])  # one product, whatever is in front
        # flax has a bias of the candidate's state alone; in torch's layout the other two are zeros.
        bias = self.bias_hh if self.kind != "flax" else F.pad(self.bias_hh, (2 * self.width, 0))
        # The products in the dtype of autocast, the gates in fp32: a slot is a sum over many rounds.
        gates_x, gates_h = F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, bias)
        xr, xz, xn = gates_x.to(h.dtype).chunk(3, dim=-1)
        hr, hz, hn = gates_h.to(h.dtype).chunk(3, dim=-1)
        z = torch.sigmoid(xz + hz)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return torch.lerp(n, h, z).view(lead)


def lecun_normal_(weight: Tensor) -> None:
    """flax's default: a normal cut at two deviations, of variance 1 / fan_in."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class GroupingOutput(NamedTuple):
    """slots: (…, K, D).  attention: (…, K, N) of the last round before it is normed over tokens, mean over heads: who took which token."""

    slots: Tensor
    attention: Tensor


class SlotAttention(nn.Module):
    """Features (…, N, in_width) to slots.

    Args:
        config: the knobs.  in_width: of the features.

    Where slots begin at random, `noise` (…, K, D) of a standard normal comes with the call: what a model draws is part of the batch.
    """

    adamw_only_parameters = ("initial_slots",)  # queries

    def __init__(self, config: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.config, c = config, config
        self.norm_input = nn.LayerNorm(in_width, eps=c.ln_eps)
        self.rounds = nn.ModuleList(
            SlotAttentionIteration(c, in_width) for _ in range(c.iterations if c.layers == "own" else 1)
        )
        if c.slot_init == "gaussian":
            # Keras' glorot_uniform on (1, 1, D) counts D and 1; torch's own of that shape would count others.
            limit = (6 / (1 + c.width)) ** 0.5
            shape = (2, c.width) if c.ground else (c.width,)  # the ground's, and all others'
            self.mu, self.log_sigma = (nn.Parameter(torch.empty(shape).uniform_(-limit, limit)) for _ in range(2))
        elif c.slot_init != "given":
            self.initial_slots = nn.Parameter(torch.randn(1 if c.slot_init == "same" else c.slots, c.width))
        if c.gradient == "last" and not c.straight_through and c.slot_init != "given":
            # No gradient reaches the initial slots. Frozen, they are counted as such, and DDP does not wait for their gradients.
            for parameter in (self.mu, self.log_sigma) if c.slot_init == "gaussian" else (self.initial_slots,):
                parameter.requires_grad_(False)

    def init_slots(self, shape: torch.Size, noise: Tensor | None) -> Tensor:
        """(…, K, D): what the slots begin as. Raises `ValueError` where they are drawn and no noise was given, or are given and were not."""
        c = self.config
        if c.slot_init == "given":
            raise ValueError("slot_init=given: slots begin as `first`, (…, K, D)")
        if c.slot_init != "gaussian":
            return self.initial_slots.expand(*shape, c.slots, c.width)
        if noise is None:
            raise ValueError(f"slots begin at random: give noise (…, {c.slots}, {c.width})")
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
    ) -> GroupingOutput:
        """Group features (…, N, in_width).

        Args:
            noise: see above.  initial_slots: (…, K, D), slots to begin with in place of the module's own.
            num_iterations: so many rounds in place of the configuration's; of shared weights.
        """
        c, lead = self.config, features.shape[:-2]
        wide = c.noise_width(features.shape[-2])
        if noise is not None and noise.shape[-2:] != (c.slots, wide):
            raise ValueError(f"noise {tuple(noise.shape)}: these slots take (…, {c.slots}, {wide})")
        slots = self.init_slots(lead, noise) if initial_slots is None else initial_slots
        # Lead dimensions are folded into one: images, frames and views of scenes are all samples.
        x = self.norm_input(features).reshape(-1, *features.shape[-2:])
        tie_noise = features.new_zeros(())
        if wide > c.width:
            if noise is None:
                raise ValueError(f"ties are broken by chance: give noise (…, {c.slots}, {wide})")
            tie_noise = noise[..., c.width :].reshape(-1, c.slots, wide - c.width)
        slots, attention = self._iterate(
            x, slots.reshape(-1, *slots.shape[-2:]), tie_noise, num_iterations or c.iterations
        )
        return GroupingOutput(slots.view(*lead, *slots.shape[-2:]), attention.view(*lead, *attention.shape[-2:]))

    def _iterate(self, x: Tensor, slots: Tensor, tie_noise: Tensor, num_iterations: int) -> tuple[Tensor, Tensor]:
        c, last = self.config, num_iterations - 1
        initial_slots = slots
        attention = slots.new_zeros(())
        kv: Any = None
        for i in range(num_iterations):
            step: Any = self.rounds[i if c.layers == "own" else 0]
            skip_grad = c.gradient == "last" and i < last
            with torch.set_grad_enabled(torch.is_grad_enabled() and not skip_grad):
                if skip_grad:
                    # Without a graph, and without what a graph would keep: the rounds before the last are a search.
                    slots = slots.detach()
                elif c.gradient == "last":
                    slots = slots.detach()
                    if c.straight_through:
                        slots = slots + initial_slots - initial_slots.detach()
                    kv = None  # what was projected without a graph
                # Keys and values once, whatever the number of rounds, where all have one set of weights.
                if kv is None or c.layers == "own":
                    kv = step.project_kv(x, tie_noise)
                slots, attention = step(kv, slots, with_mlp=c.mlp_last or i < last)
        return slots, attention


class SplitByGround(nn.Module):
    """Two of a module: one for the first slot, and one for all others. Tables (b, K, ·) to one of them."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.ground, self.others = make(), make()

    def forward(self, *tables: Tensor) -> Tensor:
        parts = ((self.ground, slice(None, 1)), (self.others, slice(1, None)))
        return torch.cat([module(*(t[:, slots] for t in tables)) for module, slots in parts], dim=1)


class SlotAttentionIteration(nn.Module):
    """One turn: queries, competition, weighted mean, update. With a ground, what is done to a slot alone is its own; keys and values are shared."""

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
        kind, gru_input_size = c.gru, c.width if c.out_proj else c.qkv
        self.gru = None if kind == "none" else make_slot_module(lambda: Gru(c.width, kind, gru_input_size))
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
        """Tokens (b, N, in) to keys and values (b, H, N, d), once for all rounds; folded, to themselves."""
        if self.transport is not None:
            return self.transport.prepare_inputs(self.to_k(x), x, tie_noise, self.config.slots), x
        if self.config.folded:
            return x, x
        k, v = (layer(x).unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for layer in (self.to_k, self.to_v))
        return self.norm_k(k), v

    def forward(self, kv: tuple[Any, Tensor], slots: Tensor, with_mlp: bool) -> tuple[Tensor, Tensor]:
        """Slots (b, K, D) to the next ones, and attention (b, K, N)."""
        c = self.config
        normed = self.norm_slots(slots)
        scale = 1 if self.transport else (c.qkv // c.heads) ** -0.5
        q = self.norm_q(self.to_q(normed).unflatten(-1, (c.heads, -1))).flatten(-2) * scale
        if self.transport is not None:
            plan = self.transport(q, normed, kv[0])
            update = self.to_v(plan.to(kv[1].dtype) @ kv[1])
            attention = plan / plan.sum(1, keepdim=True).clamp(min=1e-20)
        elif c.folded:
            # q (W_k x) = (q W_k) x, and sum_n a_n (W_v x_n) = W_v sum_n a_n x_n: the long side stays unprojected.
            update, attention = weighted_mean(c, (q @ self.to_k.weight)[:, None], kv[0][:, None], kv[1][:, None])
            update = self.to_v(update[:, 0])
        else:
            update, attention = weighted_mean(c, q.unflatten(-1, (c.heads, -1)).transpose(1, 2), *kv)
            update = update.transpose(1, 2).flatten(2)
        update = self.out(self.norm_update(update))
        # videosaur feeds the normalised slot; the difference is a function, not a rounding.
        state = normed if c.gru_on_normed else slots
        slots = state + update if self.gru is None else self.gru(update, state)
        if c.mlp_width and with_mlp:
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots, attention


def weighted_mean(c: SlotAttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (b, H, K, d), keys and values (b, H, N, ·): weighted means (b, H, K, ·), and attention (b, K, N)."""
    a = attention_weights(c, q @ k.transpose(-1, -2))
    # Over heads the shares of a token sum to one where heads compete, so they are added, not averaged.
    attention = a.mean(1) if c.softmax_over != "slots_heads" else a.sum(1)
    if c.renorm in ("none", "layer"):
        return a.to(v.dtype) @ v, attention
    # Normed behind the product, on (K, d) in place of (K, N); no copy of A + eps.
    total, weighted_sum = a.sum(-1, keepdim=True), a.to(v.dtype) @ v
    if c.renorm == "sum":
        return weighted_sum / (total + c.renorm_eps), attention
    return (weighted_sum + c.renorm_eps * v.sum(-2, keepdim=True)) / (total + c.renorm_eps * v.shape[-2]), attention


def attention_weights(c: SlotAttentionConfig, logits: Tensor) -> Tensor:
    """Logits (b, H, K, N) to shares, in fp32 at least."""
    # In 16 bits shares of thirty slots are told apart by luck.
    logits = at_least_fp32(logits)
    if c.softmax_over == "slots_heads":
        return F.softmax(logits.flatten(1, 2), dim=1).view(logits.shape)
    return F.softmax(logits, dim=-1 if c.softmax_over == "keys" else 2)
