"""Object discovery by reconstruction: an image from slots, each of which draws its part (Locatello et al. 2020, Section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import DataError
from sparo_train.objectives.method import Method

from .collapse import SlotCollapseConfig, mask_statistics
from .slot_examples import SlotExamples
from .slot_model import SlotModel, SlotModelConfig
from .slot_tower import refuse_signed


class SlotAutoencoderConfig(Frozen):
    kind: Literal["slots"] = field("slots", "a row of sparo.methods")
    model: SlotModelConfig = field(SlotModelConfig(), "encoder, grouping and decoder")
    loss: Literal["mean", "sum"] = field(
        "mean",
        "squared error: mean over pixels and colours, or their sum, which clipping and numbers of Biza et al. go by",
    )
    signed: bool = field(False, "pixels in -1..1 (Locatello et al. 2020); false: in 0..1")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "when a collapse is warned of")

    @model_validator(mode="after")
    def _check_signed(self) -> Self:
        refuse_signed(self.signed, self.model)
        return self


class SlotAutoencoder(Objective):
    """Batches hold `image` (B, 3, S, S) uint8 and `noise` (B, K, D) fp32, what slots begin from."""

    exact_inputs = True

    def __init__(self, config: SlotAutoencoderConfig):
        super().__init__()
        self.config = config
        self.model = SlotModel(config.model)
        self._fraction_done = 0.0  # share of the steps

    def pixels(self, image: Tensor) -> Tensor:
        """uint8 to the range that is reconstructed."""
        scaled = image.to(torch.float32) / 255
        return scaled * 2 - 1 if self.config.signed else scaled

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        for key in ("image", "noise"):
            if key not in batch:
                raise DataError(f"objective slots: the batch has no {key!r} (it has {', '.join(batch)})")
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        output = self.model(self.pixels(batch["image"]), batch["noise"])
        decoded, target = output.decoded, output.target
        squared_error = (decoded.image.float() - target).square()
        total = squared_error.mean() if self.config.loss == "mean" else squared_error.flatten(1).sum(1).mean()
        return Loss(total, {"mse": squared_error.detach().mean(), **mask_statistics(decoded.masks)})

    def remap_encoder_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a model of another method: a tower to go on with, whatever drew or said its slots."""
        return {f"model.{name}": value for name, value in weights.items()}

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        return self.config.collapse.check_health(facts, self._fraction_done)

    def shard_units(self) -> Sequence[nn.Module]:
        return [self.model.tower.encoder, self.model.tower.grouping, self.model.decoder]

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        side, slots = m.encoder.side(m.image_size), m.grouping.slots
        num_positions = m.decoder.side(m.target_side) ** 2
        # A convolution's width times what upsampling multiplies its area by; a perceptron's widths are written once per pixel.
        wide = (
            m.decoder.channels * 4 ** (m.decoder.num_upsample + 1) if m.decoder.kind == "cnn" else sum(m.decoder.hidden)
        )
        written = m.encoder.cost(m.image_size) + slots * num_positions * wide
        return Footprint({"image": side**2}, [], m.grouping.slots * m.grouping.width, 0, written)


def refuse_cache_with_augmentation(run: Any) -> None:
    """Raise `ValueError` where features are kept by the content of pictures that are changed at random."""
    encoder = run.objective.model.encoder
    if encoder.kind == "frozen" and encoder.cache and (run.data.hflip or run.data.crop_scale != (1.0, 1.0)):
        raise ValueError(
            "objective.model.encoder.cache: pictures that are cropped or mirrored at random are never met again; "
            "set data.crop_scale: [1.0, 1.0] and data.hflip: 0, or cache: null"
        )


METHOD = Method(
    SlotAutoencoderConfig,
    SlotAutoencoder,
    lambda config, data: SlotExamples(data, config.model),
    refuse_cache_with_augmentation,
    loss_keys=("loss", "signed", "model.target"),
)
