"""Anything that encodes images, and texts where it has a tower for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from sparo_train.data.text import ClipTokenizer
from sparo_train.models.clip import Clip
from sparo_train.models.clip_config import OPENAI_MEAN, OPENAI_STD
from sparo_train.models.readouts import Slots
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import IMAGENET_MEAN, IMAGENET_STD
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.dino import DinoObjective

_BATCH = 256


class Encoder(ABC):
    """A model in eval mode with its preprocessing.

    Args:
        model: it is put into eval mode and not changed otherwise.
        mean, std: per-channel normalisation of pixels in 0..1.
        label: where it came from.
    """

    image_size: int

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float], label: str = ""):
        self.model, self.label = model.eval(), label
        self.assumed = ""  # what the file did not say and was taken for granted
        self.device = next(iter(model.parameters())).device
        self.mean = torch.tensor(mean, device=self.device).view(3, 1, 1)
        self.std = torch.tensor(std, device=self.device).view(3, 1, 1)

    def to(self, device: str) -> Self:
        """Move model and normalisation."""
        self.model.to(device)
        self.device = next(iter(self.model.parameters())).device
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    @torch.inference_mode()
    def image(self, pixels: Iterable[np.ndarray], batch: int = _BATCH) -> Tensor:
        """Encodings (n, D), fp32 on the CPU, of (S, S, 3) uint8 images."""
        out, rows = [], []
        for array in pixels:
            rows.append(array)
            if len(rows) == batch:
                out.append(self.encode(self.stacked(rows)).cpu())
                rows = []
        if rows:
            out.append(self.encode(self.stacked(rows)).cpu())
        return torch.cat(out) if out else torch.zeros(0, self.width)

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers in one encoding."""

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) uint8 -> fp32 (n, D) on the encoder's device."""

    @staticmethod
    def stacked(rows: Sequence[np.ndarray]) -> Tensor:
        """(S, S, 3) uint8 images to (n, 3, S, S)."""
        return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2)

    def normalised(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) uint8 to what the model takes."""
        return pixels.to(self.device).float().div(255).sub(self.mean).div(self.std)


class ClipEncoder(Encoder):
    """Any of our CLIP models; encodings have norm one."""

    model: Clip

    def __init__(
        self, model: Clip, mean: Sequence[float] = OPENAI_MEAN, std: Sequence[float] = OPENAI_STD, label: str = ""
    ):
        super().__init__(model, mean, std, label)
        self.tokenizer = ClipTokenizer(model.config.text.context_length)
        self.image_size, self._width = model.config.vision.image_size, model.config.width

    @property
    def width(self) -> int:
        return self._width

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(self.normalised(pixels), normalize=True).float()

    @torch.inference_mode()
    def text(self, captions: Sequence[str], batch: int = _BATCH) -> Tensor:
        """Unit-norm fp32 encodings (n, D); each distinct caption is encoded once."""
        distinct = sorted(set(captions), key=lambda c: (len(c), c))
        parts = []
        for begin in range(0, len(distinct), batch):
            tokens = self.tokenizer.batch(distinct[begin : begin + batch])
            tokens = tokens[:, : int(tokens.argmax(dim=1).max()) + 1]  # exact under the causal mask
            parts.append(self.model.encode_text(tokens.to(self.device), normalize=True).float().cpu())
        where = {caption: i for i, caption in enumerate(distinct)}
        return torch.cat(parts)[[where[c] for c in captions]]

    @torch.inference_mode()
    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots with attention maps of a few images; SPARO models only."""
        return self.model.visual.slots(self.normalised(self.stacked(pixels)), need_attention=True)  # type: ignore[operator, return-value]

    @torch.inference_mode()
    def text_slots(self, captions: Sequence[str]) -> Slots:
        """Slots with attention maps of a few captions; SPARO models only."""
        tokens = self.tokenizer.batch(captions).to(self.device)
        return self.model.text.slots(tokens, need_attention=True)  # type: ignore[operator, return-value]


class DinoEncoder(Encoder):
    """A DINO backbone; encodings as they are (CLS behind `norm`, or flat slots), not normalised."""

    model: Vit

    def __init__(
        self, model: Vit, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD, label: str = ""
    ):
        super().__init__(model, mean, std, label)
        self.image_size = model.config.image_size

    @property
    def width(self) -> int:
        return self.model.config.out_width

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        return self.model(self.normalised(pixels)).float()

    @torch.no_grad()  # a probe is trained on these, which inference tensors do not allow
    def probe(self, pixels: Tensor, n: int = 4, avgpool: bool = False) -> Tensor:
        """What DINO's linear probe reads, see `Vit.probe_features`; (n, 3, S, S) uint8 -> fp32 (n, width)."""
        return self.model.probe_features(self.normalised(pixels), n, avgpool).float()

    @torch.inference_mode()
    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots with attention maps of a few images; SPARO models only."""
        return self.model.slots(self.normalised(self.stacked(pixels)), need_attention=True)

    @torch.inference_mode()
    def self_attention(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """Self-attention of the last block, (n, heads, N, N), CLS first."""
        return self.model.last_attention(self.normalised(self.stacked(pixels)))


class PixelEncoder(Encoder):
    """No model: an image's pixels at `size`, as a baseline."""

    def __init__(self, size: int = 28):
        super().__init__(nn.Linear(1, 1), (0.0,) * 3, (1.0,) * 3, f"pixels:{size}")
        self.image_size = size

    @property
    def width(self) -> int:
        return 3 * self.image_size**2

    def encode(self, pixels: Tensor) -> Tensor:
        return self.normalised(pixels).flatten(1)


def from_objective(objective: nn.Module) -> Encoder:
    """The encoder inside a training objective, on its device: DINO's is the teacher."""
    if isinstance(objective, DinoObjective):
        return DinoEncoder(objective.teacher.backbone, objective.config.mean, objective.config.std)
    assert isinstance(objective, ClipObjective)
    return ClipEncoder(objective.model, objective.config.mean, objective.config.std)
