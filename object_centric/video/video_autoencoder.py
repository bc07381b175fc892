"""Object discovery in videos by reconstruction, and SlotContrast (Manasyan et al. 2025), which adds a contrastive loss over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, CoupledObjective, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import DataError
from sparo_train.data.video.episode import FramesConfig
from sparo_train.objectives.method import Method

from ..decoders.broadcast import Broadcast, DecoderOutput
from ..encoders.convnet import grid
from ..objectives.collapse import SlotCollapseConfig, mask_statistics
from ..objectives.slot_autoencoder import SlotModelConfig, refuse_cache_with_augmentation
from ..objectives.slot_tower import refuse_signed
from .clip_examples import ClipExamples
from .contrast import ContrastConfig, SimilarityConfig, patch_similarity_loss, slot_contrast
from .video_tower import TimedTower, TimedTowerConfig

WIDTHS = {"pixels": 3, "flow": 3, "depth": 1, "flow_depth": 4}  # number of channels by target


class VideoModelConfig(SlotModelConfig, TimedTowerConfig):
    """A tower of videos and a decoder of its slots."""

    target: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "pixels", "features", "flow", "depth", "flow_depth", "similarity", "features_similarity"
    ] = field(
        "pixels",
        "Reconstruction target. pixels: the frames. features: the encoder's features (requires a frozen encoder). flow: optical "
        "flow as colours (SAVi). depth: log(1 + depth). flow_depth: flow and depth (SAVi++). similarity: "
        "similarities of each patch to the patches of the next frame (VideoSAUR). features_similarity: "
        "features and similarity.",
    )

    @model_validator(mode="after")
    def _check_similarity_target(self) -> Self:
        if self.num_similarity_patches and self.encoder.kind != "frozen":
            raise ValueError(
                f"target={self.target}: needs a frozen encoder, got encoder.kind={self.encoder.kind}. A trained "
                "encoder could make all patches equal. Set encoder.kind: frozen."
            )
        return self

    @property
    def is_patch_target(self) -> bool:
        """Return whether the target consists of patches instead of pixels."""
        return "features" in self.target or "similarity" in self.target

    @property
    def num_similarity_patches(self) -> int:
        """Return the number of patches of the next frame, to which similarity is predicted; 0 if it is not."""
        return self.encoder.side(self.image_size) ** 2 if "similarity" in self.target else 0

    @property
    def target_side(self) -> int:
        """Return the number of pixels, or features, per side of the target."""
        return self.encoder.side(self.image_size) if self.is_patch_target else self.image_size

    @property
    def target_channels(self) -> int:
        """Return the number of colours, or features."""
        if not self.is_patch_target:
            return WIDTHS[self.target]
        return self.num_similarity_patches + (self.encoder.width if "features" in self.target else 0)


class VideoSlotOutput(NamedTuple):
    """Slots (b, T, K, D); attention (b, T, K, s, s); decoded frames (b * T, …); features (b * T, C, s, s) of the encoder."""

    slots: Tensor
    attention: Tensor
    decoded: DecoderOutput
    features: Tensor


class VideoModel(nn.Module):
    """Model of videos (b, T, 3, S, S) in the range of the target, and standard normal noise (b, *config.noise).

    With hints, it also takes the first frame's label map (b, S, S).
    """

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
        """Return the tokens that slots group, (n, s * s, F), of frames (n, 3, S, S)."""
        return self.tower.tokens(frames)[0]


class VideoAutoencoderConfig(Frozen):
    """Slots of videos that reconstruct every frame: SAVi, SAVi++, VideoSAUR, PSB."""

    kind: Literal["video_slots"] = field("video_slots", "Training method: an entry of sparo.methods.")
    model: VideoModelConfig = field(VideoModelConfig(), "Encoder, slots through time, and decoder.")
    frames: FramesConfig = field(FramesConfig(), "Which frames of an episode form a sample.")
    loss: Literal["mean", "sum"] = field(
        "mean",
        "Reduction of the squared error. mean: the mean over frames, pixels and colours. sum: the sum over each "
        "video. SAVi's gradient clipping threshold was chosen for `sum`.",
    )
    similarity: SimilarityConfig = field(
        SimilarityConfig(),
        "Settings of the similarity loss. Only used with model.target=similarity or features_similarity.",
    )
    signed: bool = field(False, "Scale pixels to -1..1. false: 0..1.")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "Thresholds of the warning that slots collapse.")

    @model_validator(mode="after")
    def _range(self) -> Self:
        refuse_signed(self.signed, self.model)
        if self.model.num_similarity_patches and self.frames.count < 2:
            raise ValueError(
                f"frames.count={self.frames.count}: similarities are computed with the patches of the next frame. Set frames.count to two or more."
            )
        return self


class VideoAutoencoder(Objective):
    """Objective for batches of `ClipExamples`.

    They contain `video` (B, T, 3, S, S) uint8, `noise` (B, K, D) fp32, and `flow`, `depth`, `hint` if the model needs
    them.
    """

    exact_inputs = True

    def __init__(self, config: VideoAutoencoderConfig):
        super().__init__()
        self.config = config
        self.model = VideoModel(config.model)
        self._fraction_done = 0.0  # share of the steps

    def pixels(self, video: Tensor) -> Tensor:
        """Convert uint8 to the range of the target."""
        scaled = video.to(torch.float32) / 255
        return scaled * 2 - 1 if self.config.signed else scaled

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        output, errors, metrics = self.errors(batch)
        # One frame per video, because similar frames of one video do not show how similar videos are.
        first = output.decoded.masks[:: batch["video"].shape[1]]
        return Loss(errors.mean(), {**metrics, **mask_statistics(first)})

    def errors(self, batch: Batch) -> tuple[VideoSlotOutput, Tensor, dict[str, Tensor]]:
        """Return the model's output for a batch, the reconstruction error of each video (B,), and metrics."""
        c, m = self.config, self.config.model
        for key in ("video", "noise", *target_planes(m), *(["hint"] if m.hint else [])):
            if key not in batch:
                raise DataError(f"objective {c.kind}: the batch has no {key!r}, got {', '.join(batch)}")
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
            # Similarities come after the features, if both are predicted.
            image = image[:, : -m.num_similarity_patches]
        if image.shape[1]:
            squared_error = (image - self.target(batch, output)).square().unflatten(0, shape).flatten(1)
            total = total + (squared_error.mean(1) if c.loss == "mean" else squared_error.sum(1))
            metrics["mse"] = squared_error.detach().mean()
        return output, total, metrics

    def target(self, batch: Batch, output: VideoSlotOutput) -> Tensor:
        """Return the reconstruction target (B * T, C, S, S) fp32."""
        target_kind = self.config.model.target
        if target_kind.startswith("features"):
            return output.features.float()
        if target_kind == "pixels":
            return self.pixels(batch["video"]).flatten(0, 1)
        planes = {"flow": lambda flow: flow.to(torch.float32) / 255, "depth": lambda depth: depth}
        return torch.cat([planes[name](batch[name]).flatten(0, 1) for name in target_planes(self.config.model)], 1)

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Load the tower of a model of another method, whatever its decoder."""
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
        # The output of the last upsampling determines the memory.
        num_pixels = m.decoder.side(m.target_side) ** 2
        wide = (
            m.decoder.channels * 4 ** (m.decoder.num_upsample + 1) if m.decoder.kind == "cnn" else sum(m.decoder.hidden)
        )
        written = times * (m.encoder.cost(m.image_size) + slots * num_pixels * wide)
        return Footprint({"video": times * side**2}, [], times * slots * m.grouping.width, 0, written)


def target_planes(model: VideoModelConfig) -> tuple[str, ...]:
    """Return the planes of an episode that are reconstructed in addition to frames."""
    return tuple(name for name in ("flow", "depth") if name in model.target)


def _patches(features: Tensor, shape: torch.Size) -> Tensor:
    """Rearrange (b * T, C, s, s) to (b, T, s * s, C)."""
    return features.flatten(2).transpose(1, 2).unflatten(0, shape)


def clip_examples(config: Any, data: Any) -> ClipExamples:
    """Return the examples of a recipe for videos."""
    return ClipExamples(data, config.model, config.frames, target_planes(config.model))


LOSS_KEYS = ("loss", "signed", "similarity", "model.target")
METHOD = Method(
    VideoAutoencoderConfig, VideoAutoencoder, clip_examples, refuse_cache_with_augmentation, loss_keys=LOSS_KEYS
)


class SlotContrastConfig(VideoAutoencoderConfig):
    """Slots of videos with the contrastive loss of SlotContrast."""

    kind: Literal["slot_contrast"] = field("slot_contrast", "Training method: an entry of sparo.methods.")  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    contrast: ContrastConfig = field(
        ContrastConfig(), "Contrastive loss that keeps each slot on the same object over time."
    )

    @model_validator(mode="after")
    def _check_frames(self) -> Self:
        if self.frames.count < 2:
            raise ValueError(
                f"frames.count={self.frames.count}: slots are contrasted with those of the previous frame. Set frames.count to two or more."
            )
        return self


class SlotContrast(CoupledObjective, VideoAutoencoder):
    """Objective that adds the contrastive loss to that of `VideoAutoencoder`, with the same batches."""

    config: SlotContrastConfig

    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return slots (b, T, K, D), reconstruction errors (b,), and masks (b, K, s, s) of first frames."""
        # First frames only, because the logged statistics of masks are for images.
        output, errors, _ = self.errors(batch)
        return output.slots, errors, output.decoded.masks[:: batch["video"].shape[1]]

    def loss(self, embeddings: tuple[Tensor, ...], own: Sequence[Tensor], progress: Progress) -> Loss:
        self._done = progress.step / max(progress.total_steps, 1)
        slots, errors, masks = embeddings
        contrast_loss = slot_contrast(slots, self.config.contrast)
        # Masks have weight zero, but everything kept between two forwards needs a gradient.
        total = errors.mean() + self.config.contrast.weight * contrast_loss + 0 * masks.sum()
        return Loss(
            total, {"drawn": errors.detach().mean(), "contrast": contrast_loss.detach(), **mask_statistics(masks)}
        )

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        return CoupledObjective.forward(self, batch, progress)


SLOT_CONTRAST = Method(
    SlotContrastConfig, SlotContrast, clip_examples, refuse_cache_with_augmentation, loss_keys=(*LOSS_KEYS, "contrast")
)
