"""Slot model of posed scenes: slots of the context views, and any ray rendered from them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparo_train.core.config import Frozen, field
from sparo_train.core.registries import RAY_DECODERS
from sparo_train.core.registry import FromRegistry

from ..encoders.transformer import TransformerConfig
from ..grouping.parallel_binder import ParallelBinder
from ..grouping.slot_attention import GroupingOutput, SlotAttention
from ..grouping.slot_config import SlotAttentionConfig
from ..video.video_tower import RecurrentSlots
from .ray_decoder import RayDecoder, RenderedRays
from .rays import Bounds, Rays, pixel_rays
from .slot_mixer import SlotMixerConfig
from .view_encoder import ViewEncoderConfig


class SceneTowerConfig(Frozen):
    """Slots of each time separately (uORF, OSRT), from time to time (SAVi), or of all times at once (`grouping.preset: psb`)."""

    image_size: int = field(64, "Side of a view in pixels.", gt=0, le=4096)
    encoder: ViewEncoderConfig = field(ViewEncoderConfig(), "Encoder from posed views to features.")
    grouping: SlotAttentionConfig = field(SlotAttentionConfig(), "Slot attention from features to slots.")
    over_time: bool = field(
        True,
        "Carry slots from one time step to the next. false: initialize them at each time step (uORF, OSRT). "
        "A binder processes all time steps together in either case.",
    )
    predictor: TransformerConfig | None = field(
        None,
        "Transformer over slots that predicts the initial slots of the next time step. Default: slots are "
        "carried over unchanged.",
        examples=[{"preset": "savi"}],
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        g = self.grouping
        self.encoder.refuse_side(self.image_size)
        if g.transport is not None or g.pooled is not None or g.idspn is not None or g.slot_init == "given":
            raise ValueError(
                "grouping: `transport`, `pooled`, `idspn` and `slot_init=given` apply only to images and videos, "
                "not to 3D scenes. Use another preset or slot_init."
            )
        if self.predictor is not None:
            if g.binder is not None or not self.over_time:
                raise ValueError(
                    "predictor: applies only to slots that are passed from one time step to the next. Set predictor to null."
                )
            self.predictor.refuse_width(g.width, "predictor")
        if self.over_time and g.binder is None and g.gradient == "last" and not g.straight_through:
            raise ValueError(
                "grouping.gradient=last: no gradient would reach initial slots and predictor, which come before the last iteration. "
                "Set grouping.straight_through: true."
            )
        return self

    @property
    def noise(self) -> tuple[int, int]:
        """Return the shape of a scene's noise: its initial slots."""
        return self.grouping.slots, self.grouping.width


class SceneTower(nn.Module):
    """Tower for posed views (b, T, V, 9, S, S) and noise (b, *config.noise) that returns slots (b, T, K, D) and attention (b, T, K, N)."""

    def __init__(self, config: SceneTowerConfig):
        super().__init__()
        self.config, c = config, config
        self.encoder = c.encoder.build()
        self.grouping: Any
        if c.grouping.binder is not None:
            self.grouping = ParallelBinder(c.grouping, c.encoder.width)
        elif c.over_time:
            self.grouping = RecurrentSlots(c.grouping, c.predictor, c.encoder.width)
        else:
            self.grouping = PerFrameSlots(c.grouping, c.encoder.width)

    def tokens(self, posed: Tensor) -> Tensor:
        """Return the tokens that slots group, (b, T, N, F), of views (b, T, V, 9, S, S)."""
        # Each time separately: the Transformer attends across cameras, not across times.
        return self.encoder(posed.flatten(0, 1)).unflatten(0, posed.shape[:2])

    def forward(self, posed: Tensor, noise: Tensor) -> GroupingOutput:
        return self.grouping(self.tokens(posed), noise)


class PerFrameSlots(nn.Module):
    """Slots (b, T, K, D) of tokens (b, T, N, F), each time separately, all from the same initial slots.

    With `checkpointed`, backward recomputes the iterations.
    """

    checkpointed = False

    def __init__(self, grouping: SlotAttentionConfig, in_width: int):
        super().__init__()
        self.attention = SlotAttention(grouping, in_width)

    def units(self) -> list[nn.Module]:
        """Return the modules that an engine wraps one by one."""
        return [self.attention]

    def forward(self, tokens: Tensor, noise: Tensor | None = None) -> GroupingOutput:
        # The same noise for all times, so that only the inputs differ.
        frame_noise = None if noise is None else noise.repeat_interleave(tokens.shape[1], 0)
        inputs, use_checkpoint = (tokens.flatten(0, 1), frame_noise), self.checkpointed and torch.is_grad_enabled()
        output = checkpoint(self.attention, *inputs, use_reentrant=False) if use_checkpoint else self.attention(*inputs)
        return GroupingOutput(*(table.unflatten(0, tokens.shape[:2]) for table in output))


class SceneModelConfig(SceneTowerConfig):
    """A tower and a ray decoder of its slots."""

    decoder: Annotated[Any, FromRegistry(RAY_DECODERS, default="slot_mixer")] = field(
        SlotMixerConfig(), "Decoder from slots and rays to colours: an entry of sparo.ray_decoders."
    )

    @model_validator(mode="after")
    def _check_decoder_heads(self) -> Self:
        heads = getattr(self.decoder, "heads", 1)
        if self.grouping.width % heads:
            raise ValueError(f"decoder.heads={heads}: does not divide grouping.width={self.grouping.width}")
        return self

    @property
    def bounds(self) -> Bounds | None:
        """Return the range in which rays are sampled, for decoders that march along them; with a sky, everything beyond is sky."""
        near, far = getattr(self.decoder, "near", None), getattr(self.decoder, "far", None)
        far = math.inf if getattr(self.decoder, "sky", False) else far
        return None if near is None or far is None else Bounds(near, far, getattr(self.decoder, "box", None))


class SceneModel(nn.Module):
    """Model that encodes posed views (b, T, V, 9, S, S) with noise (b, *config.noise) to slots (b, T, K, D), and renders rays (b * T, R, …)."""

    def __init__(self, config: SceneModelConfig):
        super().__init__()
        self.config = config
        self.tower = SceneTower(config)
        self.decoder: RayDecoder = config.decoder.build(config.grouping.width)

    def forward(self, posed: Tensor, noise: Tensor, rays: Rays) -> tuple[Tensor, RenderedRays]:
        slots = self.tower(posed, noise).slots
        return slots, self.decoder(slots.flatten(0, 1), rays)


def posed_views(views: Tensor, poses: Tensor, lenses: Tensor) -> Tensor:
    """Return views (…, 3, S, S) uint8 with cameras as (…, 9, S, S) fp32: colours in 0..1, then origin and direction of every pixel's ray."""
    rays = pixel_rays(poses, lenses, views.shape[-1])
    return torch.cat([views.to(torch.float32) / 255, rays.movedim(-1, -3)], dim=-3)
