"""A slot model of posed scenes: slots of the views that are shown, and any ray drawn from them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import field
from sparo_train.core.registries import RAY_DECODERS
from sparo_train.core.registry import FromRegistry

from .ray_decoder import RayDecoder, RenderedRays
from .rays import Bounds, Rays, pixel_rays
from .scene_tower import SceneTower, SceneTowerConfig
from .slot_mixer import SlotMixerConfig


class SceneModelConfig(SceneTowerConfig):
    """A tower and what draws rays from its slots."""

    decoder: Annotated[Any, FromRegistry(RAY_DECODERS, default="slot_mixer")] = field(
        SlotMixerConfig(), "from slots and rays to colours: a row of sparo.ray_decoders"
    )

    @model_validator(mode="after")
    def _check_decoder_heads(self) -> Self:
        heads = getattr(self.decoder, "heads", 1)
        if self.grouping.width % heads:
            raise ValueError(f"decoder.heads={heads}: does not divide grouping.width={self.grouping.width}")
        return self

    @property
    def bounds(self) -> Bounds | None:
        """Where rays are looked at, of decoders that walk along them; where there is a sky, it is what lies beyond."""
        near, far = getattr(self.decoder, "near", None), getattr(self.decoder, "far", None)
        far = math.inf if getattr(self.decoder, "sky", False) else far
        return None if near is None or far is None else Bounds(near, far, getattr(self.decoder, "box", None))


class SceneModel(nn.Module):
    """Posed views (b, T, V, 9, S, S), standard normal noise (b, *config.noise) and rays (b * T, R, …) to slots (b, T, K, D) and what is
    drawn."""

    def __init__(self, config: SceneModelConfig):
        super().__init__()
        self.config = config
        self.tower = SceneTower(config)
        self.decoder: RayDecoder = config.decoder.build(config.grouping.width)

    def forward(self, posed: Tensor, noise: Tensor, rays: Rays) -> tuple[Tensor, RenderedRays]:
        slots = self.tower(posed, noise).slots
        return slots, self.decoder(slots.flatten(0, 1), rays)


def posed_views(views: Tensor, poses: Tensor, lenses: Tensor) -> Tensor:
    """Views (…, 3, S, S) uint8 with their cameras to (…, 9, S, S) fp32: colours in 0..1, then origin and direction of every pixel's ray."""
    rays = pixel_rays(poses, lenses, views.shape[-1])
    return torch.cat([views.to(torch.float32) / 255, rays.movedim(-1, -3)], dim=-3)
