"""SlotContrast (Manasyan et al. 2025): a video autoencoder whose slots are told apart from those of all other videos of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator
from torch import Tensor

from sparo_train.core.config import field
from sparo_train.core.contracts import Batch, CoupledObjective, Loss, Progress
from sparo_train.objectives.method import Method

from ..objectives.collapse import mask_statistics
from ..objectives.slot_autoencoder import refuse_cache_with_augmentation
from .contrast import ContrastConfig, slot_contrast
from .video_autoencoder import LOSS_KEYS, VideoAutoencoder, VideoAutoencoderConfig, clip_examples


class SlotContrastConfig(VideoAutoencoderConfig):
    kind: Literal["slot_contrast"] = field("slot_contrast", "a row of sparo.methods")  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    contrast: ContrastConfig = field(ContrastConfig(), "what keeps slots with their objects")

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


METHOD = Method(
    SlotContrastConfig, SlotContrast, clip_examples, refuse_cache_with_augmentation, loss_keys=(*LOSS_KEYS, "contrast")
)
