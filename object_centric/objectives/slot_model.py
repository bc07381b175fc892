"""A whole slot model: encoder, grouping, decoder; as a module that evaluation takes as it is."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import field
from sparo_train.models.precision import at_least_fp32

from ..decoders.broadcast import Broadcast, BroadcastConfig, DecoderOutput
from ..encoders.convnet import grid
from .slot_tower import SlotTower, SlotTowerConfig


class SlotModelConfig(SlotTowerConfig):
    """A tower and what draws its slots."""

    decoder: BroadcastConfig = field(BroadcastConfig(), "from slots to pixels, or features")
    target: Literal["pixels", "features"] = field(
        "pixels",
        "what is drawn: the image, or the encoder's features, which are not trained then (Seitzer et al. 2023)",
    )

    @model_validator(mode="after")
    def _check_decoder_target(self) -> Self:
        self.decoder.side(self.target_side)
        if self.target == "features" and self.encoder.kind != "frozen":
            raise ValueError(
                f"target=features: encoder.kind={self.encoder.kind} is trained, and could make them all alike; use frozen"
            )
        if self.frame is not None and self.decoder.kind == "patch":
            raise ValueError(
                "decoder.kind=patch: its places are learned, and slots with frames bring theirs; use mlp or cnn"
            )
        return self

    @property
    def target_side(self) -> int:
        """Pixels, or features, per side of what is drawn."""
        return self.image_size if self.target == "pixels" else self.encoder.side(self.image_size)

    @property
    def target_channels(self) -> int:
        """Colours, or features."""
        return 3 if self.target == "pixels" else self.encoder.width


class SlotOutput(NamedTuple):
    """What a slot model makes of images: slots (b, K, D), attention (b, K, s, s), the decoder's pictures, and what they are to be,
    (b, C, S, S)."""

    slots: Tensor
    attention: Tensor
    decoded: DecoderOutput
    target: Tensor


class SlotModel(nn.Module):
    """Images (b, 3, S, S) in the range that is reconstructed, and standard normal noise (b, *config.noise)."""

    def __init__(self, config: SlotModelConfig):
        super().__init__()
        self.config = config
        self.tower = SlotTower(config)
        self.decoder = Broadcast(config.decoder, config.grouping.width, config.target_side, config.target_channels)

    def forward(self, images: Tensor, noise: Tensor) -> SlotOutput:
        slots, attention, frames, features = self.tower(images, noise)
        positions = grid(self.decoder.side, images)
        if frames is not None:
            # What is drawn moves with a slot's frame, as what it read did: else frames would only help to see.
            positions = self.tower.grouping.relative(positions, *frames)
        # In fp32: errors of features are compared with pixels' and with other precisions'.
        target = images if self.config.target == "pixels" else at_least_fp32(features.permute(0, 3, 1, 2))
        return SlotOutput(slots, attention, self.decoder(slots, positions), target)
