"""Teachers of distillation: any encoder that `sparo eval` loads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparo_train.core.config import Frozen, field, resumable_field
from sparo_train.core.errors import ConfigError
from sparo_train.models.timm_backbone import as_tokens
from sparo_train.objectives.distill_examples import TeacherFacts

from .capabilities import TokensEncoder
from .encoder import Encoder
from .loading import load_encoder

_Key = tuple[str, int | None, int]


class CheckpointTeacherConfig(Frozen):
    """A model from a checkpoint. Without patch tokens or a map of features, it teaches its encoding only."""

    kind: Literal["checkpoint"] = field("checkpoint", "Kind of the teacher: an entry of sparo.teachers.")
    checkpoint: str = resumable_field(
        ...,
        "Any checkpoint that `sparo eval` loads: timm:NAME@FILE, hf:FOLDER, a run, or a file of DINO, DINOv2 or "
        "DINOv3. The file may be moved between two starts of a run, but its content must stay the same.",
        min_length=1,
        examples=["dinov2_vitb14_pretrain.pth"],
    )
    image_size: int | None = field(
        None,
        "Width and height of the teacher's view, in pixels. Default: the size of the images in the teacher's training.",
        gt=0,
        le=16384,
        examples=[224],
    )

    def build(self) -> CheckpointTeacher:
        """Return the teacher, which all objectives of a process share while one uses it. Raises `CheckpointError` or `ConfigError`."""
        teacher = _in_use.get(self._key)
        if teacher is None:
            _in_use[self._key] = teacher = CheckpointTeacher(self.checkpoint, self.image_size)
        return teacher

    def facts(self) -> TeacherFacts:
        """Return the teacher's sizes, for which it is loaded once. Raises like `build`."""
        if self._key not in _facts_by_key:
            _facts_by_key[self._key] = self.build().facts
        return _facts_by_key[self._key]

    @property
    def _key(self) -> _Key:
        # A file may be replaced while a notebook runs.
        path = Path(self.checkpoint)
        return self.checkpoint, self.image_size, path.stat().st_mtime_ns if path.is_file() else 0


class CheckpointTeacher:
    """The encoder of a checkpoint as a teacher (see `Teacher` in sparo_train/objectives/distill_examples.py)."""

    def __init__(self, checkpoint: str, image_size: int | None):
        if ":" not in checkpoint and not Path(checkpoint.partition("?")[0]).exists():
            raise ConfigError(
                f"objective.teacher.checkpoint={checkpoint}: no such file. Training reads it at every start. Download it, or change the path."
            )
        with torch.device("cpu"):  # models that are built without memory still load a teacher
            self.encoder = load_encoder(checkpoint)
            label, self.module = f"objective.teacher.checkpoint={checkpoint}", self.encoder.model
            size = image_size or self.encoder.image_size
            try:
                _fit(self.encoder, size)
                self.module.requires_grad_(False)
                # The second view differs from the first in its last row and column only.
                noise = torch.randint(
                    0, 256, (3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
                )
                views = torch.stack([noise, noise])
                views[1, :, -1], views[1, :, :, -1] = 255 - noise[:, -1], 255 - noise[:, :, -1]
                tokens = self(views)
            except (AssertionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"objective.teacher.image_size={size}: {checkpoint} does not accept images of this size "
                    f"({str(error)[:200]}). Set the teacher's own size, {self.encoder.image_size}."
                ) from None
        # Convnets pad, so every size suits them; their strides may skip pixels.
        resized_vit = isinstance(self.encoder, TokensEncoder) and size != self.encoder.image_size
        if resized_vit and torch.equal(tokens[0], tokens[1]):
            raise ConfigError(
                f"objective.teacher.image_size={size}: is not a multiple of the patch size of {checkpoint}, so the "
                f"teacher would ignore the last pixels. Choose a multiple, for example {self.encoder.image_size}, "
                "the size that the teacher was trained with."
            )
        grid = round((tokens.shape[1] - 1) ** 0.5)
        if grid**2 != tokens.shape[1] - 1:
            raise ConfigError(
                f"{label}: its {tokens.shape[1] - 1} patches do not form a square grid. Use another teacher."
            )
        memory = sum(p.numel() * p.element_size() for p in self.module.parameters())
        content = f"{self.encoder.weights} {self.encoder.architecture} {size}"
        identity = hashlib.sha256(content.encode()).hexdigest()
        self.facts = TeacherFacts(label, size, grid, tokens.shape[2], memory, identity)

    def __deepcopy__(self, memo: Any) -> CheckpointTeacher:
        """Return the teacher itself: engines copy objectives, and it never changes."""
        return self

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the class token (without one, the mean of the patches) and the patches, (B, 1 + P, D) fp32, for (B, 3, S, S) uint8."""
        encoder: Any = self.encoder
        if encoder.device != pixels.device:
            encoder.to(pixels.device)
        if isinstance(encoder, TokensEncoder):
            tokens, prefix, has_class_token = encoder.tokens(pixels), encoder.prefix_tokens, encoder.has_class_token
        elif hasattr(encoder.model, "forward_features"):  # a convnet of timm
            with torch.no_grad(), encoder.autocast():
                features = encoder.model.forward_features(encoder.normalize(pixels)).float()
            (tokens, prefix), has_class_token = as_tokens(encoder.model, features), False
        else:
            return encoder.encode(pixels).clone()[:, None]
        patches = tokens[:, prefix:]
        first = tokens[:, :1] if has_class_token else patches.mean(1, keepdim=True)
        # A copy, because a loss cannot keep tensors of inference mode for its backward.
        return torch.cat([first, patches], dim=1).clone()


def _fit(encoder: Encoder, size: int) -> None:
    """Interpolate the positions of timm's ViTs to another size; other models do it in each forward, or not at all."""
    model: Any = encoder.model
    if size != encoder.image_size and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(size, size))


_in_use: WeakValueDictionary[_Key, CheckpointTeacher] = WeakValueDictionary()
_facts_by_key: dict[_Key, TeacherFacts] = {}
