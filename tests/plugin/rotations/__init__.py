"""A method in a separate package: a ViT predicts by how many quarter turns an image was rotated (Gidaris et al. 2018), from learned queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.config import Frozen
from sparo_train.core.contracts import Batch, Loss, Objective, Progress
from sparo_train.data.examples.image_transforms import random_resized_crop_box, resized_crop
from sparo_train.data.examples.samples import decode_image, image_bytes
from sparo_train.data.read.loader import Examples, OnStage, ignore_stage
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.models.readout import ReadOut, ReadOutConfig, ReadOutPair, Slots
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from sparo_train.objectives.method import Method


class QueriesReadOut(ReadOutConfig):
    """Slots that learned queries read by one multi-head attention; an entry of `sparo.readouts`."""

    kind: Literal["queries"] = "queries"
    slots: int = Field(default=4, gt=0)
    slot_width: int = Field(default=8, gt=0)
    heads: int = Field(default=2, gt=0)

    def shape(self, embed_dim: int) -> tuple[int, int]:
        return self.slots, self.slot_width

    def build(self, image_dim: int | None, text_dim: int | None, embed_dim: int) -> ReadOutPair:
        return ReadOutPair(*(None if dim is None else Queries(dim, self) for dim in (image_dim, text_dim)))


class Queries(ReadOut):
    def __init__(self, dim: int, config: QueriesReadOut):
        super().__init__()
        self.slots, self.width = config.slots, config.slot_width
        self.query = nn.Parameter(torch.randn(1, config.slots, dim))
        self.attend = nn.MultiheadAttention(dim, config.heads, batch_first=True)
        self.proj = nn.Linear(dim, config.slot_width)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, *, need_attention: bool = False) -> Slots:
        query = self.query.expand(len(tokens), -1, -1).to(tokens.dtype)
        hidden = None if keep is None else ~keep
        read, attention = self.attend(query, tokens, tokens, key_padding_mask=hidden, need_weights=need_attention)
        return Slots(self.proj(read), attention)


class RotationsConfig(Frozen):
    kind: Literal["rotations"] = "rotations"
    model: VitConfig = VitConfig()


class Rotations(Objective):
    """Batches hold `image` (B, 3, S, S) uint8 and `turns` (B,) int64."""

    def __init__(self, config: RotationsConfig):
        super().__init__()
        self.config = config
        self.backbone = Vit(config.model)
        self.head = nn.Linear(config.model.out_width, 4)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        logits = self.head(self.backbone(batch["image"].float() / 127.5 - 1))
        right = (logits.argmax(1) == batch["turns"]).float().mean()
        return Loss(F.cross_entropy(logits.float(), batch["turns"]), {"accuracy": right.detach()})

    def shard_units(self) -> Sequence[nn.Module]:
        return list(self.backbone.blocks)


class RotatedExamples(Examples):
    def __init__(self, config: DataConfig, size: int):
        self.config, self.image_size = config, size

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        image = decode_image(image_bytes(fields, source.config.image_keys))
        pixels = resized_crop(image, random_resized_crop_box(image.size, (0.5, 1.0), rng), self.image_size)
        turns = int(rng.integers(4))
        return np.rot90(pixels, turns).transpose(2, 0, 1), turns

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        return {
            "image": torch.from_numpy(np.stack([pixels for pixels, _ in examples])),
            "turns": torch.tensor([turns for _, turns in examples]),
        }


METHOD = Method(
    RotationsConfig,
    Rotations,
    lambda config, data: RotatedExamples(data, config.model.image_size),
    exports=("rotations-backbone",),
)
