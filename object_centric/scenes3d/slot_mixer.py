"""Slot mixer: rays mix slots and decode the mixture once, whatever their number (Sajjadi et al. 2022, OSRT).

What every ray would apply to the slots is applied to slots once: attention scores are products of a ray's state with
`W_q W_k s`, values and output are one matrix, and the decoder's first layer is applied to slots before they are mixed.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import field
from sparo_train.core.errors import did_you_mean
from sparo_train.models.precision import at_least_fp32

from .radiance_field import ResidualBlocks
from .ray_decoder import RayDecoder, RenderedRays
from .rays import RayEmbeddingConfig, Rays

# osrt: stelzner/osrt, decoder.py.  psb: papers/parallel-spatiotemporal-binder, D.4.4 and Table 12.
PRESETS: dict[str, dict[str, Any]] = {
    "psb": {"query": "linear", "query_hidden": None, "blocks": 3, "heads": 4, "mlp_ratio": 4, "layers": "residual", "depth": 4},
    "osrt": {"query": "octaves", "query_hidden": 360, "blocks": 2, "heads": 12, "mlp_ratio": 2, "layers": "plain", "depth": 4, "activation": "leaky_relu"},
}  # fmt: skip


class SlotMixerConfig(RayEmbeddingConfig):
    """An allocation Transformer from rays to slots, a softmax over slots, and an MLP that decodes their mean."""

    kind: Literal["slot_mixer"] = field("slot_mixer", "Kind of the ray decoder: an entry of sparo.ray_decoders.")
    preset: str = field(
        "psb", "Named set of options. Options that the recipe sets explicitly take precedence.", examples=["osrt"]
    )
    query: Literal["linear", "octaves"] = field(
        "linear",
        "Query of a ray. linear: the ray's Fourier features, projected to the slot width; octaves: the same features without projection (OSRT).",
    )
    query_hidden: int | None = field(
        None, "Hidden units of an MLP on the query. Default: no MLP.", gt=0, examples=[360]
    )
    blocks: int = field(3, "Blocks of the allocation Transformer.", gt=0, le=100)
    heads: int = field(4, "Attention heads.", gt=0)
    mlp_ratio: int = field(4, "Hidden units of the MLPs as a multiple of the slot width.", gt=0)
    layers: Literal["residual", "plain"] = field(
        "residual", "Rendering MLP: residual blocks with norms, or plain linear layers."
    )
    activation: Literal["relu", "leaky_relu"] = field("relu", "Activation of plain layers (stelzner/osrt: leaky_relu).")
    depth: int = field(
        4,
        "Depth of the rendering MLP: number of residual blocks, or of plain layers before the last one.",
        gt=0,
        le=100,
    )
    bounded: bool = field(True, "Apply a sigmoid to colours.")
    max_activations: int = field(
        1 << 27,
        "Maximum number of activations, in floats, of all rays that are rendered at once. If a batch of rays "
        "would exceed it, the rays are rendered in parts, which bounds memory.",
        gt=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset", "psb"), str):
            return data
        name = data.get("preset", "psb")
        if name not in PRESETS:
            raise ValueError(f"preset={name}: {did_you_mean(name, PRESETS)}")
        if cls.model_fields.keys() - data.keys() == {"activation"}:
            # A resolved recipe from before this key existed: its plain layers had ReLUs.
            data = {**data, "activation": "relu"}
        return {**PRESETS[name], **data}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.layers == "residual" and self.query == "octaves":
            raise ValueError(
                "layers=residual: adds a ray's state to slots, so both need the same width. Set query: linear."
            )
        if self.layers == "residual" and self.activation != "relu":
            raise ValueError(
                f"activation={self.activation}: applies to layers=plain only. Remove it, or set layers: plain."
            )
        return self

    def build(self, width: int) -> RayDecoder:
        return SlotMixer(self, width)


class SlotCache(NamedTuple):
    """Projections of slots, shared by all rays.

    Attributes:
        keys: (n, w, H * K) per block.
        values: (n, H * K, w) per block.
        scores: (n, w, K).
        mixed: (n, K, width of the first layer).
    """

    keys: list[Tensor]
    values: list[Tensor]
    scores: Tensor
    mixed: Tensor


class SlotMixer(RayDecoder):
    """Decoder that mixes slots per ray and renders their mean (Sajjadi et al. 2022, OSRT)."""

    def __init__(self, config: SlotMixerConfig, width: int):
        super().__init__()
        self.config, c = config, config
        if width % c.heads:
            raise ValueError(f"decoder.heads={c.heads}: does not divide the slots' width {width}")
        self.max_activations, embed_width = c.max_activations, c.embed_width
        own = embed_width if c.query == "octaves" else width
        self.ray_proj = nn.Identity() if c.query == "octaves" else nn.Linear(embed_width, own)
        self.query = (
            nn.Sequential(nn.Linear(own, c.query_hidden), nn.ReLU(), nn.Linear(c.query_hidden, own))
            if c.query_hidden
            else nn.Identity()
        )
        self.blocks = nn.ModuleList(AllocationBlock(own, width, c.heads, c.mlp_ratio * width) for _ in range(c.blocks))
        self.to_q, self.to_k = nn.Linear(own, width, bias=False), nn.Linear(width, width, bias=False)
        if c.layers == "residual":
            self.render_mlp = ResidualBlocks(width, c.depth)
            self.colour = nn.Linear(width, 3)
            self.input_proj = nn.Linear(width + own, width)
        else:
            self.input_proj = nn.Linear(width + own, width)
            act = nn.LeakyReLU if c.activation == "leaky_relu" else nn.ReLU
            between = [m for _ in range(c.depth - 1) for m in (nn.Linear(width, width), act())]
            self.render_mlp, self.colour = nn.Sequential(act(), *between), nn.Linear(width, 3)

    def numbers(self, slots: int) -> int:
        c, width = self.config, self.to_k.in_features
        return c.blocks * (2 * c.mlp_ratio * width + 4 * self.to_q.in_features) + 4 * c.depth * width

    def precompute(self, slots: Tensor) -> SlotCache:
        width = slots.shape[-1]
        mixes: Any = self.input_proj
        keys, values = zip(*(block.project_slots(slots) for block in self.blocks), strict=True)  # type: ignore[operator]
        # Scale the slots' side, which is smaller.
        scores = (self.to_k(slots) * width**-0.5) @ self.to_q.weight
        return SlotCache(list(keys), list(values), scores.transpose(1, 2), F.linear(slots, mixes.weight[:, :width]))

    def allocate(self, rays: Rays, slot_cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Return rays' states before the mixing, and each slot's share of a ray (n, R, K)."""
        c = self.config
        query = self.query(self.ray_proj(c.embed(rays)))
        x = query
        for block, keys, values in zip(self.blocks, slot_cache.keys, slot_cache.values, strict=True):
            x = block(x, keys, values)
        logits = x @ slot_cache.scores.to(x.dtype)
        return query, at_least_fp32(logits).softmax(-1)

    def decode_colours(self, query: Tensor, mixed: Tensor) -> Tensor:
        """Decode mixtures (…, width of the first layer), to which the first layer was applied, with rays' states."""
        width = self.to_k.in_features
        mixes: Any = self.input_proj
        # The first layer in two parts: that of slots is cached, that of rays is computed here.
        colours = self.colour(self.render_mlp(mixed + F.linear(query, mixes.weight[:, width:], mixes.bias)))
        colours = at_least_fp32(colours)
        return colours.sigmoid() if self.config.bounded else colours

    def render(self, slots: Tensor, rays: Rays, slot_cache: SlotCache) -> RenderedRays:
        query, shares = self.allocate(rays, slot_cache)
        return RenderedRays(
            self.decode_colours(query, shares.to(slot_cache.mixed.dtype) @ slot_cache.mixed), shares, None
        )

    def render_per_slot(self, slots: Tensor, rays: Rays) -> Tensor:
        slot_cache = self.precompute(slots)
        query, shares = self.allocate(rays, slot_cache)
        slot_colours = self.decode_colours(
            query[:, :, None], slot_cache.mixed[:, None].expand(-1, query.shape[1], -1, -1)
        )
        return slot_colours * shares[..., None] + 1 - shares[..., None]


class AllocationBlock(nn.Module):
    """Block in which rays (n, R, w) attend to slots: pre-norm attention and MLP with GELU, as in SRT's decoder."""

    def __init__(self, own: int, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(own), nn.LayerNorm(own)
        self.to_q = nn.Linear(own, width, bias=False)
        self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, own)
        self.mlp = nn.Sequential(nn.Linear(own, hidden), nn.GELU(), nn.Linear(hidden, own))

    def project_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Project slots (n, K, D) to (n, w, H * K) and (n, H * K, w), by which normed rays are multiplied for scores, and values."""
        keys, values = (
            layer(slots).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.to_k, self.to_v)
        )
        keys = keys * keys.shape[-1] ** -0.5
        score_keys = torch.einsum(
            "nhkd,hdw->nwhk", keys, self.to_q.weight.unflatten(0, (self.heads, -1)).to(keys.dtype)
        )
        output_values = torch.einsum(
            "nhkd,whd->nhkw", values, self.out.weight.unflatten(1, (self.heads, -1)).to(values.dtype)
        )
        return score_keys.flatten(2), output_values.flatten(1, 2)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        logits = (self.norm_attention(x) @ keys).unflatten(-1, (self.heads, -1))
        x = x + logits.softmax(-1).flatten(-2).to(values.dtype) @ values + self.out.bias
        return x + self.mlp(self.norm_mlp(x))
