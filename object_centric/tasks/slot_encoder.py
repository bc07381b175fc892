"""A trained slot model as an encoder: slots for every task, masks for `masks`, and where slots look for pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evals.encoders.encoder import Encoder
from evals.encoders.pixels import Pixels
from sparo_train.models.slots import Slots

from ..objectives.slot_autoencoder import SlotAutoencoder
from ..objectives.slot_model import SlotModel, Slotted


class SlotEncoder(Encoder):
    """Slots begin from one draw, the same for every image: what a model says of an image must not depend on its neighbours.

    Args:
        seed: of this draw.
    """

    model: SlotModel

    def __init__(self, model: SlotModel, signed: bool, label: str = "", seed: int = 0):
        level = (0.5,) * 3 if signed else (0.0,) * 3
        super().__init__(model, level, (0.5,) * 3 if signed else (1.0,) * 3, label)
        self.image_size, self.slots = model.config.image_size, model.config.grouping.slots
        self.transform = Pixels(self.image_size, self.image_size)
        self.noise = torch.randn(model.config.noise, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    @property
    def offers(self) -> frozenset[str]:
        return super().offers | {"masks"}

    @property
    def width(self) -> int:
        return self.slots * self.model.config.grouping.width

    @property
    def architecture(self) -> str:
        return f"{self.model.config.model_dump_json()} noise {self.seed}"

    @torch.inference_mode()
    def seen(self, pixels: Tensor) -> Slotted:
        """(n, 3, S, S) uint8."""
        with self.autocast():
            return self.model(self.normalised(pixels), self.noise.to(self.device).expand(len(pixels), -1, -1))

    def encode(self, pixels: Tensor) -> Tensor:
        return self.seen(pixels).slots.float()

    def masks(self, pixels: Tensor) -> Tensor:
        """Which slot draws each pixel most: (n, S * S) fp32 whole numbers, row by row."""
        return self.seen(pixels).decoded.masks.argmax(1).flatten(1).float()

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots and how they share the pixels, for pictures: attention (n, K, S * S), which sums to one over slots."""
        found = self.seen(self.stacked(pixels))
        return Slots(found.slots.float(), found.decoded.masks.flatten(2).float())


def slot_encoder(objective: SlotAutoencoder) -> SlotEncoder:
    """The model that is trained."""
    return SlotEncoder(objective.model, objective.config.signed)
