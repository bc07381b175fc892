"""Trained slot models as encoders: slots for every task, masks for `masks`, objects for `objects`, and where slots look for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from evals.encoders.encoder import Encoder, MasksEncoder, ObjectsEncoder
from evals.encoders.pixels import Pixels
from sparo_train.models.slots import Slots

from ..objectives.set_prediction import SetModel, SetPrediction
from ..objectives.slot_autoencoder import SlotAutoencoder
from ..objectives.slot_model import SlotModel


class TowerEncoder(Encoder):
    """Slots begin from one draw, the same for every image: what a model says of an image must not depend on its neighbours.

    Args:
        signed: pixels in -1..1.  seed: of this draw.
    """

    model: Any

    def __init__(self, model: SlotModel | SetModel, signed: bool, label: str = "", seed: int = 0):
        level = (0.5,) * 3 if signed else (0.0,) * 3
        super().__init__(model, level, (0.5,) * 3 if signed else (1.0,) * 3, label)
        self.image_size, self.slots = model.config.image_size, model.config.grouping.slots
        self.transform = Pixels(self.image_size, self.image_size)
        self.noise = torch.randn(model.config.noise, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    @property
    def width(self) -> int:
        return self.slots * self.model.config.grouping.width

    @property
    def architecture(self) -> str:
        told = self.model.config.model_dump_json(
            exclude={"encoder": {"cache"}}
        )  # where features lie changes none of them
        return f"{told} noise {self.seed}"

    @torch.inference_mode()
    def seen(self, pixels: Tensor) -> Any:
        """(n, 3, S, S) uint8 to what the model says of them."""
        with self.autocast():
            return self.model(self.normalised(pixels), self.noise.to(self.device).expand(len(pixels), -1, -1))


class SlotEncoder(TowerEncoder, MasksEncoder):
    """A model that draws its slots."""

    def encode(self, pixels: Tensor) -> Tensor:
        return self.seen(pixels).slots.float().flatten(1)  # as every task takes them

    def masks(self, pixels: Tensor) -> Tensor:
        shares = self.seen(pixels).decoded.masks.float()
        if shares.shape[-1] != self.image_size:  # of patches: smooth between them, and then whose a pixel is
            shares = F.interpolate(shares, size=(self.image_size, self.image_size), mode="bilinear")
        # The largest of NaNs is a number; what is stored has to show them, or they would be scored.
        return shares.argmax(1).float().masked_fill(~shares.isfinite().all(1), torch.nan).flatten(1)

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots and where they draw, for pictures: (n, K, S * S), each slot's shares of the pixels, brought to a sum of one."""
        found = self.seen(self.stacked(pixels))
        return Slots(found.slots.float(), _shared(found.decoded.masks))


class SetEncoder(TowerEncoder, ObjectsEncoder):
    """A model that lists objects."""

    def encode(self, pixels: Tensor) -> Tensor:
        return self.seen(pixels).towered.slots.float().flatten(1)

    def objects(self, pixels: Tensor) -> Tensor:
        return self.seen(pixels).objects.float().flatten(1)

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots and which tokens they took, for pictures: (n, K, s * s)."""
        found = self.seen(self.stacked(pixels)).towered
        return Slots(found.slots.float(), _shared(found.attention))


def _shared(shares: Tensor) -> Tensor:
    """(n, K, s, s) to (n, K, s * s), every slot's of sum one."""
    flat = shares.flatten(2).float()
    return flat / flat.sum(-1, keepdim=True).clamp(min=1e-12)


def slot_encoder(objective: SlotAutoencoder) -> SlotEncoder:
    """The model that is trained."""
    return SlotEncoder(objective.model, objective.config.signed)


def set_encoder(objective: SetPrediction) -> SetEncoder:
    """The model that is trained."""
    return SetEncoder(objective.model, objective.config.signed)
