"""A trained slot model as an encoder: slots for every task, masks for `masks`, and where slots look for pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evals.encoders.encoder import Encoder, MasksEncoder
from evals.encoders.pixels import Pixels
from sparo_train.models.slots import Slots

from ..objectives.slot_autoencoder import SlotAutoencoder
from ..objectives.slot_model import SlotModel, Slotted


class SlotEncoder(Encoder, MasksEncoder):
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
        return self.seen(pixels).slots.float().flatten(1)  # as every task takes them

    def masks(self, pixels: Tensor) -> Tensor:
        shares = self.seen(pixels).decoded.masks
        # The largest of NaNs is a number; what is stored has to show them, or they would be scored.
        return shares.argmax(1).float().masked_fill(~shares.isfinite().all(1), torch.nan).flatten(1)

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots and where they draw, for pictures: (n, K, S * S), each slot's shares of the pixels, brought to a sum of one."""
        found = self.seen(self.stacked(pixels))
        drawn = found.decoded.masks.flatten(2).float()
        return Slots(found.slots.float(), drawn / drawn.sum(-1, keepdim=True).clamp(min=1e-12))


def slot_encoder(objective: SlotAutoencoder) -> SlotEncoder:
    """The model that is trained."""
    return SlotEncoder(objective.model, objective.config.signed)
