"""Slot attention in each slot's own frame of reference: translation (T-SA) and scale (TS-SA) equivariant (Biza et al. 2023, Algorithm 1).

Where paper and official code differ, the code is the default and the paper an option: the width of queries, keys and
values (64; paper 128), the renormalisation of scales (`scale_mean`), and the initial distribution of positions and
scales.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen, between, field

from .slot_attention import Gru, lecun_normal_
from .slot_config import SlotAttentionConfig


class FrameConfig(Frozen):
    """Positions and scales of slots."""

    scales: bool = field(True, "Slots have scales as well as positions (TS-SA). false: positions only (T-SA).")
    delta: float = field(5.0, "Number by which relative coordinates are divided, to keep them small.", gt=0)
    scale_clip: Annotated[tuple[float, float], between(1e-6, 100, rising=True)] = field(
        (0.001, 2.0), "Smallest and largest scale of a slot. The paper's text gives 0.01 and 5."
    )
    scale_eps: float = field(
        1e-8, "Constant that is added to the attention weights before a slot's scale is computed from them.", ge=0
    )
    scale_mean: Literal["code", "paper"] = field(
        "code",
        "Weights for the weighted mean that determines a slot's scale. code: attention + scale_eps, not normalized "
        "again (the authors' code). paper: the same weights, normalized to sum to 1.",
    )
    hidden: int = field(128, "Hidden units of the MLP that is applied to keys and values.", gt=0)


class FramedGroupingOutput(NamedTuple):
    """Slots (b, K, D), their positions and scales (b, K, 2) in y, x of [-1, 1], and attention (b, K, N) of the last iteration."""

    slots: Tensor
    positions: Tensor
    scales: Tensor
    attention: Tensor


class InvariantSlotAttention(nn.Module):
    """Grouping of features (b, N, in_width) without positions, and their grid (N, 2), to slots with frames.

    One additional iteration after `iterations` updates positions and scales, but not slots.
    """

    adamw_only_parameters = ("initial_slots",)

    def __init__(self, config: SlotAttentionConfig, frame: FrameConfig, in_width: int):
        super().__init__()
        self.config, self.frame, c = config, frame, config
        self.norm_input = nn.LayerNorm(in_width, eps=c.ln_eps)
        self.norm_slots, self.norm_mlp = (nn.LayerNorm(c.width, eps=c.ln_eps) for _ in range(2))
        self.to_q = nn.Linear(c.width, c.qkv, bias=False)
        self.to_k, self.to_v = (nn.Linear(in_width, c.qkv, bias=False) for _ in range(2))
        self.grid_proj = nn.Linear(2, c.qkv)
        self.grid_enc = nn.Sequential(
            nn.LayerNorm(c.qkv, eps=c.ln_eps),
            nn.Linear(c.qkv, frame.hidden),
            nn.ReLU(),
            nn.Linear(frame.hidden, c.width),
        )
        self.gru = Gru(c.width, "torch" if c.gru == "none" else c.gru)
        self.mlp = nn.Sequential(nn.Linear(c.width, c.mlp_width), nn.ReLU(), nn.Linear(c.mlp_width, c.width))
        if c.slot_init == "learned":
            self.initial_slots = nn.Parameter(torch.randn(c.slots, c.width))
        for module in self.modules():
            if isinstance(module, nn.Linear):  # flax's
                lecun_normal_(module.weight.data)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def init_slots(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return initial slots, positions and scales from standard normal `noise` (b, K, D + 4).

        Slots are learned or N(0, 1), positions U(-1, 1), scales N(0.1, 0.1), clipped. Each has its own noise; the
        official code draws positions and scales from one key, which correlates them by 0.98.
        """
        c, f = self.config, self.frame
        slot_noise, position_noise, scale_noise = noise.split([c.width, 2, 2], dim=-1)
        slots = self.initial_slots.expand_as(slot_noise) if c.slot_init == "learned" else slot_noise
        # A normal's distribution function makes it uniform, so that a batch has one kind of noise.
        positions = torch.special.ndtr(position_noise) * 2 - 1
        return slots, positions, (0.1 + 0.1 * scale_noise).clamp(*f.scale_clip)

    def forward(self, features: Tensor, grid: Tensor, noise: Tensor) -> FramedGroupingOutput:
        slots, positions, scales = self.init_slots(noise)
        return self.run_iterations(features, grid, slots, positions, scales)

    def run_iterations(
        self, features: Tensor, grid: Tensor, slots: Tensor, positions: Tensor, scales: Tensor
    ) -> FramedGroupingOutput:
        """Run the iterations from given slots, positions and scales."""
        c, x = self.config, self.norm_input(features)
        k, v = self.to_k(x), self.to_v(x)
        grid_enc: Any = self.grid_enc
        hidden_layers, output_layer = grid_enc[:3], grid_enc[3]
        attention = k
        for i in range(c.iterations + 1):
            normed = self.norm_slots(slots)
            # Relative to each slot, so that the same object elsewhere gives the same slot.
            grid_embed = self.grid_proj(self.relative(grid, positions, scales))  # (b, K, N, d)
            q = self.to_q(normed) * c.qkv**-0.5
            # The second layer of keys and values is linear, so it is applied to K queries and K means instead of K * N
            # tokens.
            keys = hidden_layers(k[:, None] + grid_embed)
            logits = (keys @ (q @ output_layer.weight)[..., None])[..., 0] + q @ output_layer.bias[:, None]
            attention = F.softmax(logits.to(slots.dtype), dim=1)
            weights = attention / (attention.sum(-1, keepdim=True) + c.renorm_eps)
            with torch.autocast(grid.device.type, enabled=False):  # bf16 resolves positions to 1/256 only
                positions, scales = self._update_frames(weights, grid, scales)
            # The additional iteration is for frames only.
            if i == c.iterations:
                break
            values = hidden_layers(v[:, None] + grid_embed)
            mean = (weights.to(values.dtype)[:, :, None] @ values)[:, :, 0]
            update = F.linear(mean, output_layer.weight) + weights.sum(-1, keepdim=True) * output_layer.bias
            slots = self.gru(update.flatten(0, 1), slots.flatten(0, 1)).view(slots.shape)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return FramedGroupingOutput(slots, positions, scales, attention)

    def relative(self, grid: Tensor, positions: Tensor, scales: Tensor) -> Tensor:
        """Return the grid (N, 2) in each slot's frame: (b, K, N, 2)."""
        offsets = grid - positions[:, :, None]
        return offsets / (scales[:, :, None] * self.frame.delta) if self.frame.scales else offsets

    def _update_frames(self, weights: Tensor, grid: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        f: Any = self.frame
        # Positions are in fp32 at least; attention is in 16 bits if an engine's initial slots are.
        weights = weights.to(torch.promote_types(weights.dtype, grid.dtype))
        positions = weights @ grid
        if not f.scales:
            return positions, scales
        squared_offsets = (grid - positions[:, :, None]).square()
        smoothed_weights = weights + f.scale_eps
        if f.scale_mean == "paper":
            smoothed_weights = smoothed_weights / smoothed_weights.sum(-1, keepdim=True)
        spread = torch.einsum("bkn,bknc->bkc", smoothed_weights, squared_offsets)
        # A square root has an infinite slope at zero, which a slot with a single token would reach.
        return positions, spread.clamp(min=f.scale_clip[0] ** 2).sqrt().clamp(max=f.scale_clip[1])
