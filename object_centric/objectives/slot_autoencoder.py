"""Object discovery by reconstruction: an image from slots, each of which draws its part (Locatello et al. 2020, Section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, setting
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import DataError
from sparo_train.objectives.method import Method

from .slot_examples import SlotExamples
from .slot_model import SlotModel, SlotModelConfig
from .slot_tower import refuse_signed

_UNUSED = 0.005  # share of an image's pixels below which a slot drew nothing


class SlotCollapseConfig(Frozen):
    """When the loop warns that slots do not share images among them."""

    after: float = setting(
        0.2, "share of the steps before which slots may still break up, and nothing is said", ge=0, le=1
    )
    used: float = setting(1.5, "slots that draw something, mean over images: below it one slot draws everything", ge=0)
    sharp: float = setting(
        0.05, "1 less the entropy of a pixel's shares: below it all slots draw everything", ge=0, le=1
    )


class SlotAutoencoderConfig(Frozen):
    kind: Literal["slots"] = "slots"
    model: SlotModelConfig = setting(SlotModelConfig(), "encoder, grouping and decoder")
    loss: Literal["mean", "sum"] = setting(
        "mean",
        "squared error: mean over pixels and colours, or their sum, which clipping and numbers of Biza et al. go by",
    )
    signed: bool = setting(False, "pixels in -1..1 (Locatello et al. 2020); false: in 0..1")
    collapse: SlotCollapseConfig = setting(SlotCollapseConfig(), "when a collapse is warned of")

    @model_validator(mode="after")
    def _range(self) -> Self:
        refuse_signed(self.signed, self.model)
        return self


class SlotAutoencoder(Objective):
    """Batches hold `image` (B, 3, S, S) uint8 and `noise` (B, K, D) fp32, what slots begin from."""

    def __init__(self, config: SlotAutoencoderConfig):
        super().__init__()
        self.config = config
        self.model = SlotModel(config.model)
        self._done = 0.0  # share of the steps

    def pixels(self, image: Tensor) -> Tensor:
        """uint8 to the range that is reconstructed."""
        scaled = image.to(torch.float32) / 255
        return scaled * 2 - 1 if self.config.signed else scaled

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        for key in ("image", "noise"):
            if key not in batch:
                raise DataError(f"objective slots: the batch has no {key!r} (it has {', '.join(batch)})")
        self._done = progress.step / max(progress.total_steps, 1)
        found = self.model(self.pixels(batch["image"]), batch["noise"])
        decoded, target = found.decoded, found.target
        apart = (decoded.image.float() - target).square()
        total = apart.mean() if self.config.loss == "mean" else apart.flatten(1).sum(1).mean()
        masks = decoded.masks.detach().float()
        drawn = masks.argmax(1, keepdim=True) == torch.arange(masks.shape[1], device=masks.device)[:, None, None]
        entropy = -(masks.clamp(min=1e-12).log() * masks).sum(1).mean() / np.log(max(masks.shape[1], 2))
        return Loss(
            total,
            {
                "mse": apart.detach().mean(),
                "slots_used": (drawn.float().mean((2, 3)) > _UNUSED).float().sum(1).mean(),
                "mask_sharpness": 1 - entropy,
            },
        )

    def alarm(self, facts: Mapping[str, float]) -> str | None:
        a = self.config.collapse
        if self._done < a.after:
            return None
        if facts.get("slots_used", a.used) < a.used:
            return f"one slot draws nearly everything (slots_used {facts['slots_used']:.2f}); try another seed, or a lower optim.lr"
        if facts.get("mask_sharpness", a.sharp) < a.sharp:
            return f"all slots draw the same (mask_sharpness {facts['mask_sharpness']:.3f}); try another seed, or more steps"
        return None

    def shard_units(self) -> Sequence[nn.Module]:
        return [self.model.tower.encoder, self.model.tower.grouping, self.model.decoder]

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        side, slots = m.encoder.side(m.image_size), m.grouping.slots
        drawn = m.decoder.side(m.drawn_side) ** 2
        wide = m.decoder.channels * 4 ** (m.decoder.ups + 1) if m.decoder.kind == "cnn" else sum(m.decoder.hidden)
        towers = [(m.encoder.cost(m.image_size), 1), (slots * drawn * wide, 1)]
        return Footprint({"image": side**2}, towers, m.grouping.slots * m.grouping.width, 0)


def _rules(run: Any) -> None:
    encoder = run.objective.model.encoder
    if encoder.kind == "frozen" and encoder.cache and (run.data.hflip or run.data.crop_scale != (1.0, 1.0)):
        raise ValueError(
            "objective.model.encoder.cache: pictures that are cropped or mirrored at random are never met again; "
            "set data.crop_scale: [1.0, 1.0] and data.hflip: 0, or cache: null"
        )


METHOD = Method(SlotAutoencoderConfig, SlotAutoencoder, lambda config, data: SlotExamples(data, config.model), _rules)
