"""Distillation: a student backbone, with or without slots, learns the tokens of a frozen teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from ..core.contracts import Batch, Footprint, Loss, ParamGroups, Progress
from ..core.errors import ConfigError, DataError
from ..data.examples.image_transforms import normalise
from ..models.dino_head import build_backbone
from ..models.readout import readouts
from ..models.timm_backbone import count_written_values
from ..models.vit_config import VitConfig
from .backbone_training import BackboneObjective, encoder_less_parts
from .dino_choices import choose_backbone
from .distill_config import DistillObjectiveConfig, check_recipe
from .distill_examples import BOX_UNIT, DistillExamples, TeacherFacts
from .method import Method
from .running_moments import RunningMoments


class DistillNet(nn.Module):
    """Backbone with linear maps of its encoding and of its patches to the teacher's width.

    The maps are linear, so what can be read linearly from the teacher's tokens can be read linearly from the student's.

    Args:
        model: the backbone.
        width: channels of the teacher's tokens.
        patches: map patches, too.
    """

    def __init__(self, model: VitConfig, width: int, patches: bool):
        super().__init__()
        self.backbone = build_backbone(model, patch_loss=patches)
        self.class_head = nn.Linear(model.out_width, width)
        self.patch_head = nn.Linear(model.width, width) if patches else None

    def forward(self, x: Tensor, drop: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the predicted class token (B, width) and patches (B, P, width) for normalised pixels."""
        if self.patch_head is None:
            return self.class_head(self.backbone(x, drop)), None
        encoding, patches = self.backbone.with_patches(x, drop)
        return self.class_head(encoding), self.patch_head(patches)


class DistillObjective(BackboneObjective):
    """Mean squared error between the student's predictions and the teacher's tokens, standardised per channel.

    Always predicting the mean would give an error of 1. The teacher sees the central square of an image, always the
    same, so its tokens can be cached. The student sees a crop of this square; the teacher's patches are interpolated at
    the places of the student's.

    Batches contain `image` (B, 3, S, S) uint8, `box` (B, 4) int32 (see `DistillExamples`), `tokens` (B, 1 + G * G, D)
    of the teacher or its `view` (B, 3, T, T) uint8, and with drop path `drop` (B, 2 * blocks) int32.

    The first step has a loss of zero: it only collects statistics.

    Args:
        config: the recipe's `objective` block.
        facts: sizes of the teacher, for an objective that is not trained; None: load the teacher.
    """

    networks: ClassVar[tuple[str, ...]] = ("student",)
    compile_by_default: ClassVar[bool] = True
    not_in_encoders: ClassVar[tuple[str, ...]] = (
        "class_moments.*",
        "patch_moments.*",
        "student.class_head.*",
        "student.patch_head.*",
        *encoder_less_parts("student"),
    )

    mean: Tensor
    std: Tensor

    def __init__(self, config: DistillObjectiveConfig, facts: TeacherFacts | None = None):
        super().__init__()
        self.config = config
        # In a tuple, so that the module does not contain it: it is not saved, sharded or exchanged.
        self._teacher: tuple[Any, ...] = ()
        # A teacher may draw initial weights, and the student's must not depend on them.
        with torch.random.fork_rng(devices=[]):
            if facts is None and config.cache is None:
                # A foreign model may not compile.
                self._teacher = (torch.compiler.disable(config.teacher.build().__call__),)
            self.teacher_facts = teacher = facts or config.teacher.facts()
        if config.patch_weight and not teacher.grid:
            raise ConfigError(
                f"objective.patch_weight={config.patch_weight}: {teacher.label} has no patches. Set objective.patch_weight=0."
            )
        self.student = DistillNet(config.model, teacher.width, config.patch_weight > 0)
        self.class_moments = RunningMoments(teacher.width)
        self.patch_moments = RunningMoments(teacher.width) if config.patch_weight else None
        self.register_buffer("mean", torch.tensor(config.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(3, 1, 1), persistent=False)
        self._step = -1  # step to which the collected statistics belong

    @property
    def _moments(self) -> list[RunningMoments]:
        return [m for m in (self.class_moments, self.patch_moments) if m is not None]

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        if "image" not in batch or "box" not in batch:
            raise DataError(f"objective distill: the batch has no 'image' and 'box' (it has {', '.join(batch)})")
        c, tokens = self.config, self._tokens(batch)
        class_token, patches = self.student(normalise(batch["image"], self.mean, self.std), batch.get("drop"))
        if progress.step != self._step:  # a skipped step leaves its rows behind
            for moments in self._moments:
                moments.clear()
            self._step = progress.step
        class_loss = self._error(class_token, tokens[:, 0], self.class_moments)
        metrics, total = {"class_loss": class_loss}, c.class_weight * class_loss
        if patches is not None:
            assert self.patch_moments is not None
            places = sample_at(tokens[:, 1:], batch["box"], math.isqrt(patches.shape[1]))
            metrics["patch_loss"] = self._error(patches, places, self.patch_moments)
            total = total + c.patch_weight * metrics["patch_loss"]
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def _tokens(self, batch: Batch) -> Tensor:
        if "tokens" in batch:
            return batch["tokens"]
        if isinstance(batch["view"], FakeTensor):  # FLOPs are those of the student, whoever computes the targets
            return torch.zeros(len(batch["view"]), 1 + self.teacher_facts.grid**2, self.teacher_facts.width)
        if not self._teacher:
            raise ConfigError(
                "objective distill: the loss needs the teacher, which only training loads. Remove the task that asks for the loss."
            )
        tokens, teacher = self._teacher[0](batch["view"]), self.teacher_facts
        teacher.check_tokens(tokens)
        return tokens

    def _error(self, predicted: Tensor, tokens: Tensor, moments: RunningMoments) -> Tensor:
        with torch.autocast(predicted.device.type, enabled=False):
            if self.training:
                moments.add(tokens)
            target = moments.standardise(tokens)
            precise = torch.promote_types(predicted.dtype, torch.float32)
            # Before there are statistics, targets may have any scale, and one such gradient would stay in Adam's moments.
            return F.mse_loss(predicted.to(precise), target.to(precise)) * (moments.count > 0)

    @torch.no_grad()
    def after_step(self, progress: Progress, applied: Tensor) -> None:
        """Include the teacher's tokens of this step in the statistics."""
        for moments in self._moments:
            moments.update(applied)
        self._step = -1
        super().after_step(progress, applied)

    def param_groups(self) -> ParamGroups:
        """Return the default rule, with the layers of the backbone for `optim.layer_decay`."""
        norms = {name: part for name, part in self.student.named_children() if part is not None}
        return replace(super().param_groups(), layer_ids=self.layer_ids(), norm_groups=norms)

    def shard_units(self) -> Sequence[nn.Module]:
        return list(self.student.backbone.blocks)

    def compile_units(self) -> Sequence[nn.Module]:
        return [*self.shard_units(), *readouts(self)]

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m = self.config.model
        patches = (m.image_size // m.patch_size) ** 2
        tokens, written, towers = 1 + m.registers + patches, 0, []
        if m.timm_model_name is not None:
            written = count_written_values(m.timm_model_name, m.image_size, m.image_size)
        else:
            # Of the last block, only the class token is kept if nothing else is read.
            blocks = m.blocks - int(m.readout.kind == "cls" and not self.config.patch_weight)
            towers = [(tokens * m.width, blocks)]
        # Predictions, targets, their difference and gradient; a teacher also its weights and its widest layer.
        teacher = self.teacher_facts
        loss = 4 * batch * teacher.width * 4 * (1 + (patches if self.config.patch_weight else 0))
        if self._teacher:
            loss += teacher.memory + 4 * batch * (1 + teacher.grid**2) * teacher.width * 8
        return Footprint({"image": tokens}, towers, m.out_width, loss, written)

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.student.backbone.set_grad_checkpointing(enable)


def sample_at(patches: Tensor, box: Tensor, side: int) -> Tensor:
    """Return the teacher's patches at the places of the student's, (B, side * side, D), by bilinear interpolation.

    Args:
        patches: (B, G * G, D), row by row.
        box: (B, 4) int32, left, top, width and height of the student's crop, in 1 / BOX_UNIT of the teacher's view; a
            flipped crop begins at its right edge and has a negative width.
        side: patches per side of the student.
    """
    precise = torch.promote_types(patches.dtype, torch.float32)
    grid = math.isqrt(patches.shape[1])
    image = patches.to(precise).transpose(1, 2).unflatten(2, (grid, grid))
    left, top, width, height = (box.to(precise) / BOX_UNIT)[:, :, None].unbind(1)
    centres = (torch.arange(side, device=box.device, dtype=precise) + 0.5) / side
    # grid_sample counts from -1 to 1.
    x, y = (2 * (begin + centres * length) - 1 for begin, length in ((left, width), (top, height)))
    points = torch.stack([x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], dim=-1)
    with torch.autocast(patches.device.type, enabled=False):
        return F.grid_sample(image, points, padding_mode="border", align_corners=False).flatten(2).transpose(1, 2)


def _objective_from_weights(config: DistillObjectiveConfig, weights: Mapping[str, Tensor]) -> DistillObjective:
    """Return the objective of trained weights, whose shapes give the teacher's width."""
    return DistillObjective(config, TeacherFacts("the teacher", 0, 1, len(weights["student.class_head.weight"]), 0, ""))


METHOD = Method(
    DistillObjectiveConfig,
    DistillObjective,
    DistillExamples,
    check_recipe,
    exports=("timm", "transformers", "torch", "onnx"),
    choose=choose_backbone,
    objective_of_weights=_objective_from_weights,
)
