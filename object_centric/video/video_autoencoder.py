"""Object discovery in videos by reconstruction: every frame from its slots (Kipf et al. 2022; Singh et al. 2024, Section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import DataError
from sparo_train.data.video.window import FramesConfig
from sparo_train.objectives.method import Method

from ..objectives.collapse import SlotCollapseConfig, mask_statistics
from ..objectives.slot_autoencoder import refuse_cache_with_augmentation
from ..objectives.slot_tower import refuse_signed
from .clip_examples import ClipExamples
from .contrast import SimilarityConfig, patch_similarity_loss
from .video_model import VideoModel, VideoModelConfig, VideoSlotOutput


class VideoAutoencoderConfig(Frozen):
    kind: Literal["video_slots"] = field("video_slots", "a row of sparo.methods")
    model: VideoModelConfig = field(VideoModelConfig(), "encoder, slots through time and decoder")
    frames: FramesConfig = field(FramesConfig(), "which frames of an episode a sample is")
    loss: Literal["mean", "sum"] = field(
        "mean",
        "squared error: mean over frames, pixels and colours, or their sum per video, which SAVi's clipping goes by",
    )
    similarity: SimilarityConfig = field(SimilarityConfig(), "of model.target=similarity and features_similarity")
    signed: bool = field(False, "pixels in -1..1; false: in 0..1")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "when a collapse is warned of")

    @model_validator(mode="after")
    def _range(self) -> Self:
        refuse_signed(self.signed, self.model)
        if self.model.num_similarity_patches and self.frames.count < 2:
            raise ValueError(
                f"frames.count={self.frames.count}: likeness is to the next frame's patches; give two or more"
            )
        return self


class VideoAutoencoder(Objective):
    """Batches hold what `ClipExamples` makes: `video` (B, T, 3, S, S) uint8, `noise` (B, K, D) fp32, and `flow`, `depth`, `hint` as
    far as the model draws or is told them."""

    exact_inputs = True

    def __init__(self, config: VideoAutoencoderConfig):
        super().__init__()
        self.config = config
        self.model = VideoModel(config.model)
        self._fraction_done = 0.0  # share of the steps

    def pixels(self, video: Tensor) -> Tensor:
        """uint8 to the range that is reconstructed."""
        scaled = video.to(torch.float32) / 255
        return scaled * 2 - 1 if self.config.signed else scaled

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        output, errors, metrics = self.errors(batch)
        # Of each video one frame: how alike its frames are says nothing of how alike videos are.
        first = output.decoded.masks[:: batch["video"].shape[1]]
        return Loss(errors.mean(), {**metrics, **mask_statistics(first)})

    def errors(self, batch: Batch) -> tuple[VideoSlotOutput, Tensor, dict[str, Tensor]]:
        """What the model makes of a batch; of each video what it draws wrong, (B,); and that as metrics."""
        c, m = self.config, self.config.model
        for key in ("video", "noise", *target_planes(m), *(["hint"] if m.hint else [])):
            if key not in batch:
                raise DataError(f"objective {c.kind}: the batch has no {key!r} (it has {', '.join(batch)})")
        shape = batch["video"].shape[:2]
        output = self.model(self.pixels(batch["video"]), batch["noise"], batch.get("hint"))
        image, total, metrics = output.decoded.image.float(), batch["noise"].new_zeros(shape[0]), {}
        if m.num_similarity_patches:
            similarity_logits = _patches(image[:, -m.num_similarity_patches :], shape)
            similarity_loss = patch_similarity_loss(similarity_logits, _patches(output.features, shape), c.similarity)
            total, metrics["likeness_loss"] = (
                total + c.similarity.weight * similarity_loss,
                similarity_loss.detach().mean(),
            )
            # Behind the features, where both are drawn.
            image = image[:, : -m.num_similarity_patches]
        if image.shape[1]:
            squared_error = (image - self.target(batch, output)).square().unflatten(0, shape).flatten(1)
            total = total + (squared_error.mean(1) if c.loss == "mean" else squared_error.sum(1))
            metrics["mse"] = squared_error.detach().mean()
        return output, total, metrics

    def target(self, batch: Batch, output: VideoSlotOutput) -> Tensor:
        """What frames are to be drawn as: (B * T, C, S, S) fp32."""
        target_kind = self.config.model.target
        if target_kind.startswith("features"):
            return output.features.float()
        if target_kind == "pixels":
            return self.pixels(batch["video"]).flatten(0, 1)
        planes = {"flow": lambda flow: flow.to(torch.float32) / 255, "depth": lambda depth: depth}
        return torch.cat([planes[name](batch[name]).flatten(0, 1) for name in target_planes(self.config.model)], 1)

    def remap_encoder_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a model of another method: a tower to go on with, whatever drew or said its slots."""
        return {f"model.{name}": value for name, value in weights.items()}

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        return self.config.collapse.check_health(facts, self._fraction_done)

    def shard_units(self) -> Sequence[nn.Module]:
        tower = self.model.tower
        return [tower.encoder, *tower.grouping.units(), self.model.decoder]

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.model.tower.grouping.checkpointed = enable

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m, times = self.config.model, self.config.frames.count
        side, slots = m.encoder.side(m.image_size), m.grouping.slots
        # What a transposed convolution writes at the last doubling is what memory goes by.
        num_pixels = m.decoder.side(m.target_side) ** 2
        wide = (
            m.decoder.channels * 4 ** (m.decoder.num_upsample + 1) if m.decoder.kind == "cnn" else sum(m.decoder.hidden)
        )
        written = times * (m.encoder.cost(m.image_size) + slots * num_pixels * wide)
        return Footprint({"video": times * side**2}, [], times * slots * m.grouping.width, 0, written)


def target_planes(model: VideoModelConfig) -> tuple[str, ...]:
    """What of an episode is drawn beside its frames."""
    return tuple(name for name in ("flow", "depth") if name in model.target)


def _patches(features: Tensor, shape: torch.Size) -> Tensor:
    """(b * T, C, s, s) to (b, T, s * s, C)."""
    return features.flatten(2).transpose(1, 2).unflatten(0, shape)


def clip_examples(config: Any, data: Any) -> ClipExamples:
    """What a recipe of videos trains on."""
    return ClipExamples(data, config.model, config.frames, target_planes(config.model))


LOSS_KEYS = ("loss", "signed", "similarity", "model.target")
METHOD = Method(
    VideoAutoencoderConfig, VideoAutoencoder, clip_examples, refuse_cache_with_augmentation, loss_keys=LOSS_KEYS
)
