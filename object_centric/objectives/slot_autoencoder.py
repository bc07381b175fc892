"""Object discovery by reconstruction (Locatello et al. 2020, Section 4.1): a model of encoder, grouping and decoder, and its objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import DataError
from sparo_train.models.precision import at_least_fp32
from sparo_train.objectives.method import Method, RecipeBlocks

from ..decoders.broadcast import Broadcast, BroadcastConfig, DecoderOutput
from ..encoders.convnet import grid
from .collapse import SlotCollapseConfig, mask_statistics
from .slot_tower import SlotExamples, SlotTower, SlotTowerConfig, refuse_signed


class SlotModelConfig(SlotTowerConfig):
    """A tower and a decoder of its slots."""

    decoder: BroadcastConfig = field(BroadcastConfig(), "Decoder from slots to pixels or features.")
    target: Literal["pixels", "features"] = field(
        "pixels",
        "Reconstruction target: pixels, or the features of the encoder, which must then be frozen (Seitzer et al. 2023).",
    )

    @model_validator(mode="after")
    def _check_decoder_target(self) -> Self:
        self.decoder.side(self.target_side)
        if self.target == "features" and self.encoder.kind != "frozen":
            raise ValueError(
                f"target=features: encoder.kind={self.encoder.kind} is trained, so all features could become equal. Set encoder.kind: frozen."
            )
        if self.frame is not None and self.decoder.kind == "patch":
            raise ValueError(
                "decoder.kind=patch: learns its own positions, but slots with reference frames (the key `frame`) "
                "have positions already. Set decoder.kind to mlp or cnn."
            )
        return self

    @property
    def target_side(self) -> int:
        """Return the number of pixels, or features, per side of the target."""
        return self.image_size if self.target == "pixels" else self.encoder.side(self.image_size)

    @property
    def target_channels(self) -> int:
        """Return the number of colours, or features."""
        return 3 if self.target == "pixels" else self.encoder.width


class SlotOutput(NamedTuple):
    """Output of a slot model: slots (b, K, D), attention (b, K, s, s), decoded images, and their target (b, C, S, S)."""

    slots: Tensor
    attention: Tensor
    decoded: DecoderOutput
    target: Tensor


class SlotModel(nn.Module):
    """Model of images (b, 3, S, S) in the range of the target, and standard normal noise (b, *config.noise)."""

    def __init__(self, config: SlotModelConfig):
        super().__init__()
        self.config = config
        self.tower = SlotTower(config)
        self.decoder = Broadcast(config.decoder, config.grouping.width, config.target_side, config.target_channels)

    def forward(self, images: Tensor, noise: Tensor) -> SlotOutput:
        slots, attention, frames, features = self.tower(images, noise)
        # In fp32, because errors of features are compared with those of pixels and of other precisions.
        target = images if self.config.target == "pixels" else at_least_fp32(features.permute(0, 3, 1, 2))
        return SlotOutput(slots, attention, self.decode(slots, frames), target)

    def decode(self, slots: Tensor, frames: tuple[Tensor, Tensor] | None) -> DecoderOutput:
        """Decode slots (b, K, D) with their positions and scales (b, K, 2), if they have them."""
        positions = grid(self.decoder.side, slots)
        if frames is not None:
            # The decoded object moves with its slot's frame, as the encoded one did; otherwise frames would only affect
            # the encoder.
            positions = self.tower.grouping.relative(positions, *frames)
        return self.decoder(slots, positions)


class SlotAutoencoderConfig(Frozen):
    """Slots that reconstruct an image's pixels or features (Locatello et al. 2020; Seitzer et al. 2023)."""

    kind: Literal["slots"] = field("slots", "Training method: an entry of sparo.methods.")
    model: SlotModelConfig = field(SlotModelConfig(), "Encoder, grouping and decoder.")
    loss: Literal["mean", "sum"] = field(
        "mean",
        "Reduction of the squared error over pixels and colours: mean or sum. In Biza et al., the gradient clipping "
        "threshold and the reported errors refer to the sum.",
    )
    signed: bool = field(False, "Scale pixels to -1..1 (Locatello et al. 2020). false: 0..1.")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "Thresholds of the warning that slots collapse.")

    @model_validator(mode="after")
    def _check_signed(self) -> Self:
        refuse_signed(self.signed, self.model)
        return self


class SlotAutoencoder(Objective):
    """Objective for batches of `image` (B, 3, S, S) uint8 and `noise` (B, K, D) fp32, for initial slots."""

    exact_inputs = True

    def __init__(self, config: SlotAutoencoderConfig):
        super().__init__()
        self.config = config
        self.model = SlotModel(config.model)
        self._fraction_done = 0.0  # share of the steps

    def pixels(self, image: Tensor) -> Tensor:
        """Convert uint8 to the range of the target."""
        scaled = image.to(torch.float32) / 255
        return scaled * 2 - 1 if self.config.signed else scaled

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        for key in ("image", "noise"):
            if key not in batch:
                raise DataError(f"objective `slots`: the batch has no {key!r}, got {', '.join(batch)}")
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        output = self.model(self.pixels(batch["image"]), batch["noise"])
        decoded, target = output.decoded, output.target
        squared_error = (decoded.image.float() - target).square()
        total = squared_error.mean() if self.config.loss == "mean" else squared_error.flatten(1).sum(1).mean()
        return Loss(total, {"mse": squared_error.detach().mean(), **mask_statistics(decoded.masks)})

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Load the tower of a model of another method, whatever its decoder."""
        return {f"model.{name}": value for name, value in weights.items()}

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        return self.config.collapse.check_health(facts, self._fraction_done)

    def shard_units(self) -> Sequence[nn.Module]:
        return [self.model.tower.encoder, self.model.tower.grouping, self.model.decoder]

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        side, slots = m.encoder.side(m.image_size), m.grouping.slots
        num_positions = m.decoder.side(m.target_side) ** 2
        # The width of a convolution, multiplied by the area after upsampling; widths of an MLP are written once per
        # pixel.
        wide = (
            m.decoder.channels * 4 ** (m.decoder.num_upsample + 1) if m.decoder.kind == "cnn" else sum(m.decoder.hidden)
        )
        written = m.encoder.cost(m.image_size) + slots * num_positions * wide
        return Footprint({"image": side**2}, [], m.grouping.slots * m.grouping.width, 0, written)


def refuse_cache_with_augmentation(recipe: RecipeBlocks[Any]) -> None:
    """Raise `ValueError` if features are cached by image content while images are augmented."""
    encoder = recipe.objective.model.encoder
    if encoder.kind == "frozen" and encoder.cache and (recipe.data.hflip or recipe.data.crop_scale != (1.0, 1.0)):
        raise ValueError(
            "objective.model.encoder.cache: random crops and flips give a different image in every epoch, so cached features would not be used again. "
            "Set data.crop_scale: [1.0, 1.0] and data.hflip: 0, or cache: null"
        )


METHOD = Method(
    SlotAutoencoderConfig,
    SlotAutoencoder,
    lambda config, data: SlotExamples(data, config.model),
    refuse_cache_with_augmentation,
    loss_keys=("loss", "signed", "model.target"),
)
