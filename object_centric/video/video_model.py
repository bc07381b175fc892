"""A slot model of videos: every frame drawn from its slots."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import field

from ..decoders.broadcast import Broadcast, DecoderOutput
from ..encoders.convnet import grid
from ..objectives.slot_model import SlotModelConfig
from .video_tower import TimedTower, TimedTowerConfig

WIDTHS = {"pixels": 3, "flow": 3, "depth": 1, "flow_depth": 4}  # colours of each thing that is drawn


class VideoModelConfig(SlotModelConfig, TimedTowerConfig):
    """A tower of videos and what draws its slots."""

    target: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "pixels", "features", "flow", "depth", "flow_depth", "similarity", "features_similarity"
    ] = field(
        "pixels",
        "what is drawn: frames; the encoder's features, which are not trained then; where points came from, as colours (SAVi); "
        "log(1 + depth); both (SAVi++); how like each patch is to those of the next frame (VideoSAUR); that and features",
    )

    @model_validator(mode="after")
    def _check_similarity_target(self) -> Self:
        if self.num_similarity_patches and self.encoder.kind != "frozen":
            raise ValueError(
                f"target={self.target}: encoder.kind={self.encoder.kind} is trained, and could make patches all alike; use frozen"
            )
        return self

    @property
    def is_patch_target(self) -> bool:
        """Whether what is drawn stands on patches, not on pixels."""
        return "features" in self.target or "similarity" in self.target

    @property
    def num_similarity_patches(self) -> int:
        """Patches of the next frame, to which it is drawn how like each is; 0: it is not."""
        return self.encoder.side(self.image_size) ** 2 if "similarity" in self.target else 0

    @property
    def target_side(self) -> int:
        """Pixels, or features, per side of what is drawn."""
        return self.encoder.side(self.image_size) if self.is_patch_target else self.image_size

    @property
    def target_channels(self) -> int:
        """Colours, or features."""
        if not self.is_patch_target:
            return WIDTHS[self.target]
        return self.num_similarity_patches + (self.encoder.width if "features" in self.target else 0)


class VideoSlotOutput(NamedTuple):
    """slots (b, T, K, D); attention (b, T, K, s, s); every frame's pictures (b * T, …); features (b * T, C, s, s) of the encoder."""

    slots: Tensor
    attention: Tensor
    decoded: DecoderOutput
    features: Tensor


class VideoModel(nn.Module):
    """Videos (b, T, 3, S, S) in the range that is reconstructed, standard normal noise (b, *config.noise), and of slots that are told
    the first frame's label map (b, S, S)."""

    def __init__(self, config: VideoModelConfig):
        super().__init__()
        self.config = config
        self.tower = TimedTower(config)
        self.decoder = Broadcast(config.decoder, config.grouping.width, config.target_side, config.target_channels)

    def forward(self, images: Tensor, noise: Tensor, hint: Tensor | None = None) -> VideoSlotOutput:
        slots, attention, features = self.tower(images, noise, hint)
        decoded = self.decoder(slots.flatten(0, 1), grid(self.decoder.side, slots))
        return VideoSlotOutput(slots, attention, decoded, features.permute(0, 3, 1, 2))

    def frame_tokens(self, frames: Tensor) -> Tensor:
        """Frames (n, 3, S, S) to what slots group, (n, s * s, F)."""
        return self.tower.tokens(frames)[0]
