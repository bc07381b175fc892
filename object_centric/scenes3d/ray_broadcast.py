"""Every slot drawn at every ray on its own, then mixed by softmax: the spatial broadcast decoder of scenes (Sajjadi et al. 2022)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import between, field

from .ray_decoder import RayDecoder, RenderedRays
from .rays import RayEmbeddingConfig, Rays


class RayBroadcastConfig(RayEmbeddingConfig):
    """A perceptron of a ray and a slot."""

    kind: Literal["broadcast"] = field("broadcast", "a row of sparo.ray_decoders")
    hidden: Annotated[tuple[int, ...], between(1, 1 << 16)] = field(
        (1536, 1536, 1536), "hidden units of each layer (OSRT's)", min_length=1
    )
    bounded: bool = field(False, "colours go through a sigmoid")
    max_activations: int = field(
        1 << 27, "floats that rays drawn at once may write; more are drawn in turns, so memory has a bound", gt=0
    )

    def build(self, width: int) -> RayDecoder:
        return RayBroadcast(self, width)


class RayBroadcast(RayDecoder):
    def __init__(self, config: RayBroadcastConfig, width: int):
        super().__init__()
        self.config, c = config, config
        self.max_activations = c.max_activations
        # The first layer of both, in two: rays' part is made once for all slots, slots' part once for all rays.
        self.of_ray, self.of_slot = nn.Linear(c.embed_width, c.hidden[0]), nn.Linear(width, c.hidden[0], bias=False)
        layers = [m for a, b in zip(c.hidden, c.hidden[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(nn.ReLU(), *layers, nn.Linear(c.hidden[-1], 4))

    def numbers(self, slots: int) -> int:
        return 2 * slots * sum(self.config.hidden)

    def precompute(self, slots: Tensor) -> Tensor:
        return self.of_slot(slots)

    def decode_slots(self, rays: Rays, slot_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Colours (n, R, K, 3) and shares (n, R, K) of slots."""
        c = self.config
        output = self.layers(self.of_ray(c.embed(rays))[:, :, None] + slot_cache[:, None])
        # In fp32 at least before the softmax: slots that nearly tie share a ray by rounding.
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        colours = output[..., 1:]
        return colours.sigmoid() if c.bounded else colours, F.softmax(output[..., 0], dim=-1)

    def render(self, slots: Tensor, rays: Rays, slot_cache: Tensor) -> RenderedRays:
        colours, shares = self.decode_slots(rays, slot_cache)
        return RenderedRays((colours * shares[..., None]).sum(-2), shares, None)

    def render_per_slot(self, slots: Tensor, rays: Rays) -> Tensor:
        colours, shares = self.decode_slots(rays, self.precompute(slots))
        return colours * shares[..., None] + 1 - shares[..., None]
