"""Encoder of our CLIP models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparo_train.data.examples.image_text import ClipTokenizer
from sparo_train.models.clip_config import OPENAI_MEAN, OPENAI_STD, TRAINING
from sparo_train.models.clip_model import Clip
from sparo_train.models.readout import Slots
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.text_conditioned import conditioned_scores

from .capabilities import ConditionedEncoder, TokensEncoder
from .dense import DenseEncoder
from .encoder import TwoTowerEncoder, encode_texts, texts_per_batch
from .pixels import MappedPixels

_NOT_ENCODING: Any = {  # names, options of training, and a width that follows from the weights' shapes
    "backbone": True,
    "embed_dim": True,
    "init_logit_scale": True,
    "init_logit_bias": True,
    "text": TRAINING,
}


class ClipEncoder(TwoTowerEncoder, TokensEncoder, DenseEncoder, ConditionedEncoder):
    """Encoder of any of our CLIP models."""

    model: Clip

    def __init__(
        self, model: Clip, mean: Sequence[float] = OPENAI_MEAN, std: Sequence[float] = OPENAI_STD, label: str = ""
    ):
        super().__init__(model, mean, std, label)
        self.tokenizer = ClipTokenizer(model.config.text.context_length)
        self.tokenize = self.tokenizer.batch
        self.image_size, self._width = model.config.vision.image_size, model.config.width
        # As in open_clip's evaluation transform: the shorter side has the image's size, and squares are not cropped. 16
        # bits are not clipped to white as there, but mapped as in training, according to the run.
        self.transform = MappedPixels(self.image_size, self.image_size)
        self.slots = model.config.slots

    @property
    def width(self) -> int:
        return self._width

    @property
    def architecture(self) -> str:
        config = self.model.config
        # Without options of training, because features of two runs that only differ in these are equal.
        return config.model_dump_json(
            exclude={**_NOT_ENCODING, "vision": {"patch_dropout", *config.vision.unused_keys}}
        )

    @property
    def prefix_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.visual.prefix

    @property
    def token_width(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.vision.width

    @property
    def has_class_token(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.visual.has_cls

    @torch.inference_mode()
    def tokens(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model.visual.tokens(self.normalize(pixels)).float()

    @property
    def pools_by_text(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.config.readout.conditioned

    @torch.inference_mode()
    def patches(self, pixels: Tensor) -> Tensor:
        with self.autocast():
            return self.model.encode_local(self.normalize(pixels))[1].float()

    @torch.inference_mode()
    def queries(self, captions: Sequence[str]) -> Tensor:
        def encode(tokens: Tensor) -> Tensor:
            with self.autocast():
                return self.model.encode_text(tokens.to(self.device))

        return encode_texts(captions, self.tokenize, encode, texts_per_batch(self.device), normalize=False)

    @torch.inference_mode()
    def conditioned(self, patches: Tensor, queries: Tensor) -> Tensor:
        # Parameters of the pooling module, with which an image has one encoding per text.
        pool, heads = self.model.pool_parameters(), self.model.config.readout.heads
        local = patches.to(self.device).float().unflatten(1, (-1, self.model.config.embed_dim))
        return conditioned_scores(local, queries.to(self.device), pool, heads).cpu()

    @torch.inference_mode()
    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots with attention maps of a few images; SPARO models only."""
        return self.model.visual.slots(self.normalize(self.stack(pixels)), need_attention=True)  # type: ignore[operator, return-value]

    @torch.inference_mode()
    def text_slots(self, captions: Sequence[str]) -> Slots:
        """Return slots with attention maps of a few captions; SPARO models only."""
        tokens = self.tokenizer.batch(captions).to(self.device)
        return self.model.text.slots(tokens, need_attention=True)  # type: ignore[operator, return-value]


def clip_encoder(objective: ClipObjective) -> ClipEncoder:
    """Return the encoder of the trained model, or of its average."""
    return ClipEncoder(objective.scored, objective.config.mean, objective.config.std)
