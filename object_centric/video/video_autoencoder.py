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

WIDTHS = {"pixels": 3, "flow": 3, "depth": 1, "flow_depth": 4}  # colours of each thing that is drawn


class VideoModelConfig(SlotModelConfig, TimedTowerConfig):
    """A tower of videos and what draws its slots."""

    target: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "pixels", "features", "flow", "depth", "flow_depth", "similarity", "features_similarity"
    ] = field(
        "pixels",
        "Reconstruction target. pixels; features of the encoder, which is frozen then; flow: optical flow as colours "
        "(SAVi); depth: log(1 + depth); flow_depth: both (SAVi++); similarity: of each patch to those of the next "
        "frame (VideoSAUR); features_similarity: both.",
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


class VideoAutoencoderConfig(Frozen):
    kind: Literal["video_slots"] = field("video_slots", "Entry of sparo.methods.")
    model: VideoModelConfig = field(VideoModelConfig(), "Encoder, slots through time, and decoder.")
    frames: FramesConfig = field(FramesConfig(), "Frames of an episode in a sample.")
    loss: Literal["mean", "sum"] = field(
        "mean",
        "Squared error: mean over frames, pixels and colours, or the sum per video, on which SAVi's gradient clipping is based.",
    )
    similarity: SimilarityConfig = field(
        SimilarityConfig(), "Similarity loss of model.target=similarity and features_similarity."
    )
    signed: bool = field(False, "Scale pixels to -1..1. false: 0..1.")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "Thresholds of the warning that slots collapse.")

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


class SlotContrastConfig(VideoAutoencoderConfig):
    kind: Literal["slot_contrast"] = field("slot_contrast", "Entry of sparo.methods.")  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    contrast: ContrastConfig = field(ContrastConfig(), "Contrastive loss that keeps slots with their objects.")

    @model_validator(mode="after")
    def _two_frames(self) -> Self:
        if self.frames.count < 2:
            raise ValueError(
                f"frames.count={self.frames.count}: a slot is told apart from others a frame before; give two or more"
            )
        return self


class SlotContrast(CoupledObjective, VideoAutoencoder):
    """Batches are those of `VideoAutoencoder`, whose loss is added to, and so is what is drawn."""

    config: SlotContrastConfig

    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """Slots (b, T, K, D), errors (b,) of what is drawn, and masks (b, K, s, s) of first frames."""
        # First frames alone: what is logged of masks is of images, not of videos.
        output, errors, _ = self.errors(batch)
        return output.slots, errors, output.decoded.masks[:: batch["video"].shape[1]]

    def loss(self, embeddings: tuple[Tensor, ...], own: Sequence[Tensor], progress: Progress) -> Loss:
        self._done = progress.step / max(progress.total_steps, 1)
        slots, errors, masks = embeddings
        contrast_loss = slot_contrast(slots, self.config.contrast)
        # Masks count for nothing; what is kept between two forwards has to have a gradient.
        total = errors.mean() + self.config.contrast.weight * contrast_loss + 0 * masks.sum()
        return Loss(
            total, {"drawn": errors.detach().mean(), "contrast": contrast_loss.detach(), **mask_statistics(masks)}
        )

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        return CoupledObjective.forward(self, batch, progress)


SLOT_CONTRAST = Method(
    SlotContrastConfig, SlotContrast, clip_examples, refuse_cache_with_augmentation, loss_keys=(*LOSS_KEYS, "contrast")
)
