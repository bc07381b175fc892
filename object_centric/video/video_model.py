"""A slot model of videos: every frame encoded on its own, slots through time, every frame drawn from its slots."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import setting

from ..decoders.broadcast import Broadcast, Decoded
from ..encoders.convnet import grid
from ..grouping.binder import ParallelBinder
from ..objectives.slot_model import SlotModelConfig
from ..objectives.slot_tower import SlotTower
from .recurrent import PredictorConfig, RecurrentSlots


class VideoModelConfig(SlotModelConfig):
    """Recurrent slots (SAVi and its kin), or with `grouping.binder` slots that bind all times at once (PSB)."""

    predictor: PredictorConfig | None = setting(
        None, "what the next frame's slots begin as, of those that turns take from frame to frame; null: as they are"
    )

    @model_validator(mode="after")
    def _over_time(self) -> Self:
        if self.frame is not None:
            raise ValueError("frame: positions and scales of slots are of still images; leave it away")
        if self.grouping.transport is not None:
            raise ValueError("grouping.transport: is of still images; leave it away")
        if self.grouping.binder is not None and self.predictor is not None:
            raise ValueError("predictor: a binder sees all times at once; set it to null")
        if self.grouping.gradient == "last" and not self.grouping.straight_through:
            raise ValueError(
                "grouping.gradient=last: nothing would teach first slots or a predictor, which come before the last round; "
                "set grouping.straight_through: true"
            )
        if self.predictor is not None and self.grouping.width % self.predictor.heads:
            raise ValueError(
                f"predictor.heads={self.predictor.heads} does not divide grouping.width={self.grouping.width}"
            )
        return self


class TimedSlots(NamedTuple):
    """slots (b, T, K, D).  attention: (b, T, K, s, s).  features: (b * T, s, s, C), as the encoder gave them."""

    slots: Tensor
    attention: Tensor
    features: Tensor


class VideoTower(SlotTower):
    """Videos (b, T, 3, S, S) and standard normal noise (b, *config.noise) to slots of every frame."""

    config: VideoModelConfig

    def grouped_by(self) -> Any:
        c = self.config
        return (
            RecurrentSlots(c.grouping, c.predictor, c.features)
            if c.grouping.binder is None
            else ParallelBinder(c.grouping, c.features)
        )

    def forward(self, images: Tensor, noise: Tensor) -> TimedSlots:
        tokens, features = self.tokens(images.flatten(0, 1))
        slots, attention = self.grouping(tokens.unflatten(0, images.shape[:2]), noise)
        side = features.shape[1]
        return TimedSlots(slots, attention.unflatten(-1, (side, side)), features)


class VideoDrawn(NamedTuple):
    """slots (b, T, K, D); attention (b, T, K, s, s); every frame's pictures (b * T, …), and what they are to be, (b * T, C, S, S)."""

    slots: Tensor
    attention: Tensor
    decoded: Decoded
    target: Tensor


class VideoModel(nn.Module):
    """Videos (b, T, 3, S, S) in the range that is reconstructed, and standard normal noise (b, *config.noise)."""

    def __init__(self, config: VideoModelConfig):
        super().__init__()
        self.config = config
        self.tower = VideoTower(config)
        self.decoder = Broadcast(config.decoder, config.grouping.width, config.drawn_side, config.drawn_width)

    def forward(self, images: Tensor, noise: Tensor) -> VideoDrawn:
        slots, attention, features = self.tower(images, noise)
        decoded = self.decoder(slots.flatten(0, 1), grid(self.decoder.side, images.device))
        target = images.flatten(0, 1) if self.config.target == "pixels" else features.permute(0, 3, 1, 2).float()
        return VideoDrawn(slots, attention, decoded, target)
