"""Trained slot models as encoders: slots for every task, masks for `masks`, objects for `objects`, and attention for pictures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from evals.encoders.capabilities import DrawingEncoder, MasksEncoder, ObjectsEncoder
from evals.encoders.encoder import Encoder
from evals.encoders.pixels import MappedPixels
from sparo_train.models.readout import Slots

from ..decoders.broadcast import DecoderOutput
from ..objectives.set_prediction import SetModel, SetPrediction
from ..objectives.slate import Slate, SlateModel
from ..objectives.slot_autoencoder import SlotAutoencoder, SlotModel
from ..objectives.slot_tower import SlotTower, TowerOutput


class TowerEncoder(Encoder):
    """Encoder whose initial slots come from one sample, the same for every image, so that encodings do not depend on the batch.

    Args:
        signed: pixels in -1..1.
        seed: of the sample.
    """

    model: Any

    def __init__(
        self, model: SlotModel | SetModel | SlateModel | SlotTower, signed: bool, label: str = "", seed: int = 0
    ):
        level = (0.5,) * 3 if signed else (0.0,) * 3
        super().__init__(model, level, (0.5,) * 3 if signed else (1.0,) * 3, label)
        self.image_size, self.slots = model.config.image_size, model.config.grouping.slots
        self.transform = MappedPixels(self.image_size, self.image_size, rgb_first=True)
        # Sampled on the CPU, because a GPU's generator gives other values, and so other slots.
        self.noise = torch.randn(model.config.noise, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    @property
    def width(self) -> int:
        return self.slots * self.model.config.grouping.width

    @property
    def architecture(self) -> str:
        config_json = self.model.config.model_dump_json(
            exclude={"encoder": {"cache"}}
        )  # the location of a cache changes no feature
        return f"{config_json} noise {self.seed}"

    @torch.inference_mode()
    def run_model(self, pixels: Tensor) -> Any:
        """Run the model on (n, 3, S, S) uint8."""
        with self.autocast():
            return self.model(self.normalize(pixels), self.noise.to(self.device).expand(len(pixels), -1, -1))


class Decomposition(NamedTuple):
    """Decomposition of a batch, for pictures.

    Attributes:
        soft_masks: (n, K, S, S).
        reconstruction: (n, 3, S, S) in 0..1.
        slot_images: of each slot, (n, K, 3, S, S). Both are None if the model does not reconstruct pixels, or not per
            slot.
    """

    soft_masks: Tensor
    reconstruction: Tensor | None
    slot_images: Tensor | None


class ImageObjects(NamedTuple):
    """Slots of one image, with their masks.

    Attributes:
        slots: (K, D) fp32.
        masks: (K, S, S) fp32, each slot's share of every pixel of the model's view (`transform`), which sum to 1 over
            slots.
        shares: (K,), the share of pixels in which a slot's mask is the largest; 0 for an unused slot.
    """

    slots: Tensor
    masks: Tensor
    shares: Tensor


class MaskingEncoder(TowerEncoder, MasksEncoder):
    """Encoder of a model whose slots divide an image."""

    def objects(self, image: Image.Image) -> ImageObjects:
        """Return the slots of a PIL image, with their masks and shares.

        Raises:
            DataError: pixels that the run's `data.pixel_range` does not map.
        """
        slots = self.images([image])[0].unflatten(0, (self.slots, -1))
        pixels = self.stack([np.asarray(self.transform(image))])
        masks = self.soft_masks(pixels)[0].clone()
        masks = masks / masks.sum(0, keepdim=True).clamp_min(torch.finfo(masks.dtype).tiny)
        shares = F.one_hot(masks.argmax(0).flatten(), self.slots).float().mean(0)
        return ImageObjects(slots, masks, shares)

    @abstractmethod
    def soft_masks(self, pixels: Tensor) -> Tensor:
        """Return each slot's share of every pixel, fp32 (n, K, S, S), for (n, 3, S, S) uint8."""

    @abstractmethod
    def decompose(self, pixels: Tensor) -> Decomposition:
        """Return masks and reconstructions."""

    def masks(self, pixels: Tensor) -> Tensor:
        soft_masks = self.soft_masks(pixels)
        # argmax of NaN is a number, so NaN must be stored, or it would be scored.
        return soft_masks.argmax(1).float().masked_fill(~soft_masks.isfinite().all(1), torch.nan).flatten(1)

    def upsample_masks(self, soft_masks: Tensor) -> Tensor:
        """Upsample shares (n, K, s, s) smoothly to the image's size, before masks are made by argmax."""
        size = (self.image_size, self.image_size)
        return (
            soft_masks.float()
            if soft_masks.shape[-2:] == size
            else F.interpolate(soft_masks.float(), size, mode="bilinear")
        )

    def denormalize(self, picture: Tensor) -> Tensor:
        """Convert a reconstruction to 0..1."""
        return picture.float() * self.std + self.mean


class SlotEncoder(MaskingEncoder, DrawingEncoder):
    """Encoder of a model that reconstructs from slots."""

    masks_are = "decoder, patches' shares bilinear"

    @property
    def draws(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "pixels" if self.model.config.target == "pixels" else f"features of {self.model.tower.encoder.identity}"

    @property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.target_side**2 * self.model.config.target_channels

    def encode(self, pixels: Tensor) -> Tensor:
        return self.run_model(pixels).slots.float().flatten(1)  # in the form that every task takes

    def soft_masks(self, pixels: Tensor) -> Tensor:
        return self.upsample_masks(self.run_model(pixels).decoded.masks)

    def decompose(self, pixels: Tensor) -> Decomposition:
        return self.to_decomposition(self.run_model(pixels).decoded)

    def to_decomposition(self, decoded: DecoderOutput) -> Decomposition:
        """Convert decoded images, for pictures."""
        soft_masks = self.upsample_masks(decoded.masks)
        if self.draws != "pixels":
            return Decomposition(soft_masks, None, None)
        return Decomposition(soft_masks, self.denormalize(decoded.image), self.denormalize(decoded.slot_images))

    @torch.inference_mode()
    def squared_error(self, pixels: Tensor) -> Tensor:
        output = self.run_model(pixels)
        return self.reconstruction_error(output.decoded, output.target)

    def reconstruction_error(self, decoded: DecoderOutput, target: Tensor) -> Tensor:
        """Return the mean squared error of each image, (n, 1)."""
        residual = decoded.image.float() - target
        if self.draws == "pixels":
            residual = residual * self.std  # in -1..1, a pixel's error is twice that in 0..1
        return residual.square().flatten(1).mean(1, keepdim=True)

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots and their masks for pictures: (n, K, S * S), normalized per slot to a sum of one."""
        output = self.run_model(self.stack(pixels))
        return Slots(output.slots.float(), normalize_masks(output.decoded.masks))


class GroupingEncoder(MaskingEncoder):
    """Encoder of a tower alone, whose masks are attention."""

    masks_are = "slots' attention, bilinear"

    def encode(self, pixels: Tensor) -> Tensor:
        return self.run_model(pixels).slots.float().flatten(1)

    def soft_masks(self, pixels: Tensor) -> Tensor:
        return self.upsample_masks(self.run_model(pixels).attention)

    def decompose(self, pixels: Tensor) -> Decomposition:
        return Decomposition(self.soft_masks(pixels), None, None)

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots and their attention to tokens for pictures: (n, K, s * s)."""
        output = self.run_model(self.stack(pixels))
        return Slots(output.slots.float(), normalize_masks(output.attention))


class SlateEncoder(GroupingEncoder, DrawingEncoder):
    """Encoder of a model that predicts tokens, whose pictures are generated from slots."""

    draws = "pixels"

    @property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 3 * self.image_size**2

    @torch.inference_mode()
    def run_model(self, pixels: Tensor) -> TowerOutput:
        with self.autocast():
            return self.model.encode_slots(
                self.normalize(pixels), self.noise.to(self.device).expand(len(pixels), -1, -1)
            )

    @torch.inference_mode()
    def decompose(self, pixels: Tensor) -> Decomposition:
        output = self.run_model(pixels)
        with self.autocast():
            reconstruction = self.model.generate(output.slots).float().clamp(0, 1)  # clipped as in the authors' code
        return Decomposition(self.upsample_masks(output.attention), reconstruction, None)

    @torch.inference_mode()
    def squared_error(self, pixels: Tensor) -> Tensor:
        reconstruction = self.decompose(pixels).reconstruction
        assert reconstruction is not None
        return (reconstruction - self.normalize(pixels)).square().flatten(1).mean(1, keepdim=True)


class SetEncoder(TowerEncoder, ObjectsEncoder):
    """Encoder of a model that predicts a set of objects."""

    def encode(self, pixels: Tensor) -> Tensor:
        return self.run_model(pixels).tower_output.slots.float().flatten(1)

    def objects(self, pixels: Tensor) -> Tensor:
        return self.run_model(pixels).objects.float().flatten(1)

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots and their attention to tokens for pictures: (n, K, s * s)."""
        tower_output = self.run_model(self.stack(pixels)).tower_output
        return Slots(tower_output.slots.float(), normalize_masks(tower_output.attention))


def normalize_masks(soft_masks: Tensor) -> Tensor:
    """Normalize masks (n, K, s, s) to (n, K, s * s) with a sum of one per slot."""
    flat = soft_masks.flatten(2).float()
    return flat / flat.sum(-1, keepdim=True).clamp(min=1e-12)


def slot_encoder(objective: SlotAutoencoder) -> SlotEncoder:
    """Return the encoder of a trained objective."""
    return SlotEncoder(objective.model, objective.config.signed)


def set_encoder(objective: SetPrediction) -> SetEncoder:
    """Return the encoder of a trained objective."""
    return SetEncoder(objective.model, objective.config.signed)


def slate_encoder(objective: Slate) -> SlateEncoder:
    """Return the encoder of a trained objective."""
    return SlateEncoder(objective.model, signed=False)
