"""Object discovery in videos by predicting every frame's tokens from its slots: STEVE (Singh et al. 2022b), and PSB with that decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Progress
from sparo_train.core.registries import SLOT_ENCODERS
from sparo_train.core.registry import FromRegistry
from sparo_train.data.video.episode import FramesConfig
from sparo_train.objectives.method import Method

from ..encoders.convnet import ConvNetConfig
from ..objectives.collapse import SlotCollapseConfig
from ..objectives.slate import Slate, SlateModel, SlateModelConfig, SlateOutput
from ..objectives.slot_autoencoder import refuse_cache_with_augmentation
from .clip_examples import ClipExamples
from .video_tower import TimedTower, TimedTowerConfig


class VideoSlateModelConfig(SlateModelConfig, TimedTowerConfig):
    """A discrete VAE, a tower of videos that groups frames' features (STEVE) or their tokens, and a decoder of tokens."""

    encoder: Annotated[Any, FromRegistry(SLOT_ENCODERS, default="conv")] = field(
        ConvNetConfig(last_relu=False),
        "Encoder that computes the input of slot attention. Use an entry of sparo.slot_encoders to turn pixels into "
        "features, or `{kind: tokens}` to use the tokens of the discrete VAE.",
    )


class VideoSlateConfig(Frozen):
    """STEVE: SLATE on videos; with `grouping.preset: psb`, PSB with this decoder."""

    kind: Literal["video_slate"] = field("video_slate", "Training method: an entry of sparo.methods.")
    model: VideoSlateModelConfig = field(
        VideoSlateModelConfig(), "The model: discrete VAE, tower (encoder and slot attention) and decoder."
    )
    frames: FramesConfig = field(FramesConfig(count=3), "Which frames of an episode form a sample.")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "Thresholds of the warning that slots collapse.")


class VideoSlateModel(SlateModel):
    """Model of videos (b, T, 3, S, S) in 0..1, standard normal noise (b, *config.noise), and with hints the first frame's label map (b, S, S)."""

    config: VideoSlateModelConfig
    tower: TimedTower

    def build_tower(self, config: Any) -> nn.Module:
        return TimedTower(config)

    def forward(self, images: Tensor, noise: Tensor, tau: float, hint: Tensor | None = None) -> SlateOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        frames, shape = images.flatten(0, 1), images.shape[:2]
        return self.forward_with_grouping(
            frames, tau, lambda e: self.tower(self._encoder_input(frames, e).unflatten(0, shape), noise, hint)
        )

    def frame_tokens(self, frames: Tensor) -> Tensor:
        """Return the tokens that slots group, (n, s * s, F), of frames (n, 3, S, S): features, or each patch's most probable token."""
        if self.config.encoder.kind == "tokens":
            frames = self._encoder_input(frames, self.argmax_embedding(frames))
        return self.tower.tokens(frames)[0]


class VideoSlate(Slate):
    """Objective for batches of `video` (B, T, 3, S, S) uint8, `noise` (B, *config.model.noise) fp32, and with hints `hint` (B, S, S) uint8.

    Both errors are summed over a frame and averaged over frames.
    """

    def build_model(self, config: Any) -> SlateModel:
        return VideoSlateModel(config)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        self.require_keys(batch, "video", "noise", *(["hint"] if self.config.model.hint else []))
        video, tau = batch["video"].float() / 255, self.temperature(progress)
        output = self.model(video, batch["noise"], tau, batch.get("hint"))
        # One frame per video, because similar frames of one video do not show how similar videos are.
        return self.compute_loss(video.flatten(0, 1), output, output.tower_output.attention[:, 0], tau)

    def shard_units(self) -> Sequence[nn.Module]:
        m: Any = self.model
        return [m.dvae.encoder, m.dvae.decoder, m.tower.encoder, *m.tower.grouping.units(), *m.decoder.blocks]

    def set_grad_checkpointing(self, enable: bool) -> None:
        tower: Any = self.model.tower
        tower.grouping.checkpointed = enable

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        one, times = super().footprint(batch, world_batch), self.config.frames.count
        towers = [(times * wide, blocks) for wide, blocks in one.towers]
        return Footprint({"video": times * one.tokens["image"]}, towers, times * one.encoding, 0, times * one.written)


def _examples(config: Any, data: Any) -> ClipExamples:
    return ClipExamples(data, config.model, config.frames)


METHOD = Method(VideoSlateConfig, VideoSlate, _examples, refuse_cache_with_augmentation, loss_keys=("model.dvae",))
