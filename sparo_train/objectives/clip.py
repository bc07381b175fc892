"""The contrastive objective of CLIP (Radford et al. 2021), for any of our read-outs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.config import Frozen
from ..core.contracts import Batch, Loss, Objective, Progress
from ..core.errors import DataError
from ..models.clip import Clip
from ..models.clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig

MAX_LOGIT_SCALE = math.log(100)


class ClipObjectiveConfig(Frozen):
    kind: Literal["clip"] = "clip"
    model: ClipConfig = ClipConfig()
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    # sparo-clip decays every matrix, position embeddings and SPARO's queries included; open_clip >= 4 leaves position embeddings out.
    decay_policy: Literal["sparo-clip", "open_clip4"] = "sparo-clip"
    max_logit_scale: float = Field(default=MAX_LOGIT_SCALE, gt=0)


class Embeddings(NamedTuple):
    """Unit-norm encodings in fp32: image (B, width), text (B, width)."""

    image: Tensor
    text: Tensor


class ClipObjective(Objective):
    """Symmetric softmax cross-entropy between images and texts of the batch, logits in fp32.

    `embed` and `loss` are apart because the loss needs the whole global batch, however it is gathered.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ClipObjectiveConfig):
        super().__init__()
        self.config = config
        self.model = Clip(config.model)
        self.register_buffer("mean", torch.tensor(config.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(3, 1, 1), persistent=False)

    def pixels(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> normalised fp32, with torchvision's ToTensor + Normalize arithmetic."""
        return image.to(torch.float32).div(255).sub(self.mean).div(self.std)

    def embed(self, batch: Batch) -> Embeddings:
        """Encode `image` (B, 3, H, W) uint8 and `text` (B, T) int64."""
        for key in ("image", "text"):
            if key not in batch:
                raise DataError(f"objective clip: the batch has no {key!r} (it has {', '.join(batch)})")
        return Embeddings(
            self.model.encode_image(self.pixels(batch["image"]), normalize=True),
            self.model.encode_text(batch["text"], normalize=True),
        )

    def loss(self, embeddings: Embeddings, progress: Progress) -> Loss:
        """CLIP's loss over the given embeddings; metrics: loss, accuracy (image to text), logit_scale."""
        with torch.autocast(embeddings.image.device.type, enabled=False):
            scale = self.model.logit_scale.exp()
            logits = scale * embeddings.image @ embeddings.text.T
            labels = torch.arange(len(logits), device=logits.device)
            total = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return Loss(total, {"loss": total.detach(), "accuracy": accuracy, "logit_scale": scale.detach()})

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        return self.loss(self.embed(batch), progress)

    def shard_units(self) -> Sequence[nn.Module]:
        return [*self.model.visual.transformer.resblocks, *self.model.text.transformer.resblocks]

    def no_decay(self) -> Iterable[str]:
        names = set(super().no_decay())
        if self.config.decay_policy == "open_clip4":
            names |= {"model.visual.positional_embedding", "model.text.positional_embedding"}
        return names

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.model.set_grad_checkpointing(enable)

    @torch.no_grad()
    def after_step(self, progress: Progress) -> None:
        self.model.logit_scale.clamp_(0, self.config.max_logit_scale)
