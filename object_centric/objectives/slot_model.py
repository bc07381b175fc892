"""A whole slot model: encoder, grouping, decoder; as a module that evaluation takes as it is."""

from __future__ import annotations

from typing import NamedTuple, Self

from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import setting

from ..decoders.broadcast import Broadcast, BroadcastConfig, Decoded
from ..encoders.convnet import grid
from .slot_tower import SlotTower, SlotTowerConfig


class SlotModelConfig(SlotTowerConfig):
    """A tower and what draws its slots."""

    decoder: BroadcastConfig = setting(BroadcastConfig(), "from slots to pixels")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.decoder.side(self.image_size)
        return self


class Slotted(NamedTuple):
    """What a slot model makes of images: slots (b, K, D), attention (b, K, s, s), and the decoder's pictures."""

    slots: Tensor
    attention: Tensor
    decoded: Decoded


class SlotModel(nn.Module):
    """Images (b, 3, S, S) in the range that is reconstructed, and standard normal noise (b, *config.noise)."""

    def __init__(self, config: SlotModelConfig):
        super().__init__()
        self.config = config
        self.tower = SlotTower(config)
        self.decoder = Broadcast(config.decoder, config.grouping.width, config.image_size)

    def forward(self, images: Tensor, noise: Tensor) -> Slotted:
        slots, attention, frames = self.tower(images, noise)
        onto = grid(self.decoder.side, images.device)
        if frames is not None:
            onto = self.tower.grouping.relative(onto, *frames)
        return Slotted(slots, attention, self.decoder(slots, onto))
