"""Encoders of our DINO models and distilled students, and of DINO's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sparo_train.core.errors import ConfigError
from sparo_train.models.readout import Slots
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import IMAGENET_MEAN, IMAGENET_STD
from sparo_train.models.weight_files.dino_files import DinoFile, vit_config
from sparo_train.models.weight_files.weights import load_into
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig
from sparo_train.objectives.distill import DistillObjective
from sparo_train.objectives.distill_config import DistillObjectiveConfig

from .capabilities import BlocksEncoder, PatchesEncoder, TokensEncoder
from .encoder import Encoder
from .pixels import MappedPixels


class ImageDescription(NamedTuple):
    """Everything that a DINO backbone computes for n images; patches are in rows of the image.

    Attributes:
        encoding: (n, D), as scored: the class token after `norm`, or the flat slots.
        cls: (n, d), class token after `norm`.
        patches: (n, P, d), after `norm`.
        slots: (n, L, V); None without a readout.
        attention: (n, L, P), each slot's attention to patches; None without a readout.
    """

    encoding: Tensor
    cls: Tensor
    patches: Tensor
    slots: Tensor | None
    attention: Tensor | None


class DinoEncoder(Encoder, BlocksEncoder, PatchesEncoder, TokensEncoder):
    """Encoder of a DINO backbone; encodings are not normalised (CLS after `norm`, or flat slots)."""

    model: Vit

    def __init__(
        self, model: Any, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD, label: str = ""
    ):
        super().__init__(model, mean, std, label)
        self.image_size, self.token_width = model.config.image_size, model.embed_dim
        self.prefix_tokens = model.prefix
        # Crop as in eval_knn.py and eval_linear.py.
        self.transform = MappedPixels(self.image_size, round(self.image_size * 256 / 224), rgb_first=True)
        self.slots = model.config.slots

    @property
    def width(self) -> int:
        return self.model.config.out_width

    @property
    def architecture(self) -> str:
        return self.model.config.model_dump_json(exclude={"arch", "drop_path", "weight_init"})  # options of training

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model(self.normalize(pixels)).float()

    @torch.no_grad()  # probes are trained on these, which inference tensors do not allow
    def probe(self, pixels: Tensor, n: int = 4, avgpool: bool = False) -> Tensor:
        """Return the input of DINO's linear probe, see `Vit.probe_features`; (n, 3, S, S) uint8 -> fp32 (n, width)."""
        with self.autocast():
            return self.model.probe_features(self.normalize(pixels), n, avgpool).float()

    @torch.inference_mode()
    def describe(self, images: Sequence[Image.Image | np.ndarray | str | Path]) -> ImageDescription:
        """Return encoding, class token, patches, slots and their attention of images of any size; see `images`."""
        x = self.normalize(self.stack(self.preprocess(images)))
        with self.autocast():
            tokens = self.model.intermediate(x, 1)[0].float()
            slots = None if self.model.read_by is None else self.model.slots(x, need_attention=True)
        cls, patches = tokens[:, 0], tokens[:, self.model.prefix :]
        if slots is None:
            return ImageDescription(cls, cls, patches, None, None)
        assert slots.attention is not None
        attention = slots.attention[..., -patches.shape[1] :].float()
        return ImageDescription(slots.flat().float(), cls, patches, slots.values.float(), attention)

    @torch.inference_mode()
    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots with attention maps of a few images; SPARO models only."""
        return self.model.slots(self.normalize(self.stack(pixels)), need_attention=True)

    def patch_tokens(self, normalised: Tensor) -> Tensor:
        # Without the class token and registers, which have no position in the image.
        return self.model.intermediate(normalised, 1)[0][:, self.model.prefix :]

    @torch.inference_mode()
    def tokens(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model.intermediate(self.normalize(pixels), 1)[0].float()

    @torch.inference_mode()
    def self_attention(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """Return self-attention of the last block, (n, heads, N, N), CLS first."""
        return self.model.last_attention(self.normalize(self.stack(pixels)))


class TimmDinoEncoder(DinoEncoder):
    """Encoder of one of timm's models that was trained with DINO; it has no blocks with class tokens to probe."""

    @property
    def offers(self) -> frozenset[str]:
        return super().offers - {"blocks"}

    @property
    def has_class_token(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.prefix_tokens > 0

    @torch.inference_mode()
    def describe(self, images: Sequence[Image.Image | np.ndarray | str | Path]) -> ImageDescription:
        """Return encoding, pooled features (`cls`), features per position (`patches`), slots and their attention."""
        x = self.normalize(self.stack(self.preprocess(images)))
        found = super().describe(images)
        with self.autocast():
            net: Any = self.model
            pooled = net.model.forward_head(net.model.forward_features(x), pre_logits=True).float()
        return found._replace(cls=pooled, encoding=pooled if found.slots is None else found.encoding)

    def self_attention(self, pixels: Sequence[np.ndarray]) -> Tensor:
        raise ConfigError(
            f"{self.label}: the self-attention of this timm model cannot be read. Draw the attention of slots."
        )


def dino_encoder(objective: DinoObjective) -> DinoEncoder:
    """Return the encoder of the teacher's backbone, which DINO scores and releases."""
    return _backbone_encoder(objective.teacher.backbone, objective.config)


def student_encoder(objective: DistillObjective) -> DinoEncoder:
    """Return the encoder of the student's backbone, without the maps to the teacher's width."""
    return _backbone_encoder(objective.student.backbone, objective.config)


def _backbone_encoder(backbone: nn.Module, config: DinoObjectiveConfig | DistillObjectiveConfig) -> DinoEncoder:
    kind = DinoEncoder if config.model.timm_model_name is None else TimmDinoEncoder
    return kind(backbone, config.mean, config.std)


def from_dino_file(file: DinoFile, name: str | None) -> DinoEncoder:
    """Return the encoder of a backbone that a file of DINO contains; `name`: its architecture, if the shapes do not decide it."""
    config, assumed = vit_config(file, name)
    model = Vit(config)
    load_into(model, file.backbone, file.origin)
    encoder = DinoEncoder(model, *file.normalisation, file.origin)
    encoder.assumed = assumed
    return encoder
