"""DINO (Caron et al. 2021) with the CLS token or SPARO: student, teacher, and the cross-entropy between their crops."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.contracts import Batch, Footprint, Loss, ParamGroups, Progress
from ..core.distributed import sum_over_ranks
from ..core.ema import Follow, update_mean
from ..core.errors import CollapseError, ConfigError, DataError
from ..core.schedules import cosine, linear
from ..data.examples.image_transforms import normalise
from ..data.examples.masking import Masking
from ..data.examples.multi_crop import CropExamples
from ..data.sources.base import DataConfig
from ..models.dino_head import DinoNet, Views, masked_rows
from ..models.readout import readouts
from ..models.timm_backbone import count_written_values
from ..models.vit import Vit
from ..models.vit_config import DROP_RANGE
from .backbone_training import BackboneObjective, encoder_less_parts
from .dino_choices import choose
from .dino_config import DinoObjectiveConfig, check_recipe
from .dino_health import LastBatch, collapse_message, slow_metrics
from .dino_loss import Targets, centered_targets, distillation, gram, koleo, masked_distillation, sinkhorn_targets
from .method import Method


class DinoObjective(BackboneObjective):
    """DINO: `student` learns to predict the output of `teacher`, its moving average, for other crops of the same image.

    Batches contain `global_crops` (B, G, C, S, S) uint8, `local_crops` (B, n, C, s, s) uint8 if there are any, and with
    drop path `drop` (B, G + n, 2 * blocks) int32 below DROP_RANGE; with Gram anchoring `plain_crops` (B, G, C, P, P)
    uint8. The centre moves once per step, by the mean of the teacher's raw logits over the global batch, however many
    micro-batches and ranks it is split over.
    """

    # The teacher's heads update their own buffers.
    follows: ClassVar[Mapping[str, Follow]] = {
        "teacher": Follow("student", "momentum", buffers=False),
        # After the teacher, so that it copies the teacher of the same step.
        "earlier": Follow("teacher.backbone", "copy_teacher"),
    }
    compile_by_default: ClassVar[bool] = True
    not_in_encoders: ClassVar[tuple[str, ...]] = (
        "center",
        "patch_center",
        "earlier.*",
        *(f"{net}.{head}.*" for net in ("student", "teacher") for head in ("head", "patch_head")),
        *encoder_less_parts("student", "teacher"),
    )
    networks: ClassVar[tuple[str, ...]] = ("student", "teacher")

    mean: Tensor
    std: Tensor
    center: Tensor
    patch_center: Tensor

    def __init__(self, config: DinoObjectiveConfig):
        super().__init__()
        self.config = config
        patch_loss = config.ibot is not None or config.gram is not None
        self.student = DinoNet(config.model, config.head, config.ibot is not None, config.patch_head, patch_loss)
        # Without gradients from the start, so that neither the optimizer nor the gradient exchange includes it.
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        # The teacher of an earlier step, for Gram anchoring.
        self.earlier = None if config.gram is None else copy.deepcopy(self.teacher.backbone)
        # The centre of the encodings' logits, and that of the masked patches'.
        for name in ("center", *(("patch_center",) if config.ibot else ())):
            self.register_buffer(name, torch.zeros(1, config.head.out_dim))
            # The sum of logits, and their number.
            self.register_buffer(f"_{name}_sums", torch.zeros(config.head.out_dim + 1), persistent=False)
        self.register_buffer("mean", torch.tensor(config.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(-1, 1, 1), persistent=False)
        self._last: LastBatch | None = None
        self._step = -1  # progress that the sums belong to

    def pixels(self, image: Tensor) -> Tensor:
        """Convert (…, 3, H, W) uint8 to normalised fp32, with the arithmetic of torchvision's ToTensor + Normalize."""
        return normalise(image, self.mean, self.std)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        if "global_crops" not in batch:
            raise DataError(f"objective dino: the batch has no 'global_crops' (it has {', '.join(batch)})")
        c, crops = self.config, []
        for key in ("global_crops", "local_crops"):
            if key in batch:
                crops.append(self.pixels(_by_crop(batch[key])))
        teachers = batch["global_crops"].shape[1]
        # The teacher has no drop path; only the student does.
        drops: list[Tensor | None] = [None] * len(crops)
        if "drop" in batch:
            drops = [_by_crop(batch["drop"][:, :teachers]), _by_crop(batch["drop"][:, teachers:])]
        masked = batch.get("masked")
        masks = None if masked is None else _masks(masked, teachers, self._patches)
        # Only the two global crops, because targets must describe the whole image.
        with torch.no_grad():
            theirs: Views = self.teacher(crops[:1], [None], None, masked)
        anchored = c.gram is not None and progress.step >= c.gram.first_step
        views: Views = self.student(crops, drops[: len(crops)], masks, masked, anchored)
        self._begin_sums(progress.step)
        targets = self._targets("center", theirs.logits, progress)
        result = distillation(views.logits, targets, teachers, c.student_temp)
        metrics = {
            "teacher_entropy": result.entropy,
            "teacher_kl": result.kl,
            "center_norm": self.center.norm(),
        }
        self._last = LastBatch(theirs.encodings, targets.values, progress.step / progress.total_steps)
        total = result.loss
        if masked is not None:
            metrics["ibot_loss"] = self._ibot(views, theirs, masked, teachers, progress)
            assert c.ibot is not None
            total = total + c.ibot.weight * metrics["ibot_loss"]
        if c.koleo:
            # Within each kind of crop, because two crops of an image should be close.
            metrics["koleo_loss"] = torch.stack([koleo(x) for x in views.encodings.chunk(teachers)]).sum()
            total = total + c.koleo * metrics["koleo_loss"]
        if anchored:
            assert c.gram is not None and isinstance(self.earlier, Vit) and views.patches is not None
            with torch.no_grad():
                earlier = self.earlier.patches(self.pixels(_by_crop(batch["plain_crops"])))
            metrics["gram_loss"] = gram(views.patches, earlier)
            total = total + c.gram.weight * metrics["gram_loss"]
        if total is not result.loss:
            metrics["dino_loss"] = result.loss
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def _ibot(self, views: Views, theirs: Views, masked: Tensor, teachers: int, progress: Progress) -> Tensor:
        """Return iBOT's loss, as DINOv2 computes it: the mean over the masked patches of a crop, then over all global crops."""
        assert views.patch_logits is not None and theirs.patch_logits is not None
        images, places = masked_rows(masked, teachers * self._patches)
        valid = places < teachers * self._patches
        targets = self._targets("patch_center", theirs.patch_logits, progress, valid)
        counts = (masked < teachers * self._patches).sum(1).clamp(min=1)
        weights = valid.to(targets.values.dtype) / counts[images] / (teachers * len(masked))
        return masked_distillation(views.patch_logits, targets, weights, self.config.student_temp)

    def _targets(self, name: str, logits: Tensor, progress: Progress, valid: Tensor | None = None) -> Targets:
        """Return the teacher's targets, and add its logits to the sums of the next centre."""
        temperature = self.teacher_temp(progress)
        if self.config.centering == "sinkhorn_knopp":
            return sinkhorn_targets(logits, temperature, valid)
        targets = centered_targets(logits, self.get_buffer(name), temperature, valid)
        sums = self.get_buffer(f"_{name}_sums")
        with torch.no_grad():
            kept = logits if valid is None else logits * valid[:, None]
            sums[:-1] += kept.sum(0, dtype=sums.dtype)
            sums[-1] += len(logits) if valid is None else valid.sum()
        return targets

    @property
    def _patches(self) -> int:
        """Return the number of patches of a global crop."""
        return (self.config.model.image_size // self.config.model.patch_size) ** 2

    def _begin_sums(self, step: int) -> None:
        # Micro-batches of one step add up; the next step begins at zero.
        if step != self._step:  # a skipped step leaves its rows behind
            for name in ("center", "patch_center"):
                if hasattr(self, name):
                    self.get_buffer(f"_{name}_sums").zero_()
            self._step = step

    def teacher_temp(self, progress: Progress) -> float:
        """Return the teacher's temperature, which rises by epoch from `warmup_teacher_temp` to `teacher_temp`."""
        c, epoch = self.config, progress.epoch
        warm = c.warmup_teacher_temp_epochs
        return linear(c.warmup_teacher_temp, c.teacher_temp, epoch, warm) if epoch < warm else c.teacher_temp

    def momentum(self, progress: Progress) -> float:
        """Return the share of itself that the teacher keeps after a step. `Objective.after_step` in core/contracts.py updates it."""
        return cosine(self.config.momentum_teacher, 1.0, progress.step, progress.total_steps)

    def copy_teacher(self, progress: Progress) -> float | None:
        """Return 0 in steps after which `earlier` becomes a copy of the teacher, None in others."""
        assert self.config.gram is not None
        return 0.0 if self.config.gram.copies_after(progress.step) else None

    def on_weights_loaded(self) -> None:
        if self.earlier is not None:
            self.earlier.load_state_dict(self.teacher.backbone.state_dict())

    def refuse_length(self, total_steps: int) -> None:
        if self.config.gram is not None and self.config.gram.first_step >= total_steps:
            raise ConfigError(
                f"objective.gram.first_step={self.config.gram.first_step}: the run has only {total_steps} steps. Lower it."
            )

    @torch.no_grad()
    def after_step(self, progress: Progress, applied: Tensor) -> None:
        """Update the center from the mean of the teacher's logits of this step (Eq. 4), and the teacher in `Objective.after_step`."""
        for name in ("center", "patch_center") if self.config.centering == "mean" else ():
            if hasattr(self, name):
                # Sums and counts, because ranks may hold different numbers of rows.
                sums = sum_over_ranks(self.get_buffer(f"_{name}_sums"))
                mean = (sums[:-1] / sums[-1].clamp(min=1))[None]
                update_mean(self.get_buffer(name), mean, self.config.center_momentum, applied)
        self._step = -1
        super().after_step(progress, applied)

    def frozen_this_step(self, progress: Progress) -> Sequence[nn.Parameter]:
        """Return the prototypes during the first `freeze_last_layer` epochs."""
        frozen = progress.epoch < self.config.freeze_last_layer
        # Early prototypes follow random features; freezing them prevents a collapse (Caron et al., App.).
        heads = [head for head in (self.student.head, self.student.patch_head) if head is not None]
        return [p for head in heads for p in head.last_layer.parameters()] if frozen else []

    def log_metrics(self) -> Mapping[str, float | Tensor]:
        """Return statistics of the teacher's encodings and targets of the last (micro-)batch of this rank."""
        return {} if self._last is None else slow_metrics(self._last)

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        """Return a message if the representation has collapsed to the same output for every image, uniform or one-hot.

        Raises:
            CollapseError: the same, with `collapse.action=stop`.
        """
        message = collapse_message(self.config.collapse, self.config.head.out_dim, facts)
        if message is not None and self.config.collapse.action == "stop":
            raise CollapseError(f"{message}. Change one of them, or set objective.collapse.action=warn.")
        return message

    def shard_units(self) -> Sequence[nn.Module]:
        # The teacher's blocks first, because its forward comes first and FSDP2 prefetches in this order.
        backbones = (self.teacher.backbone, self.student.backbone, self.earlier)
        return [block for backbone in backbones if backbone is not None for block in backbone.blocks]

    def compile_units(self) -> Sequence[nn.Module]:
        return [*self.shard_units(), *readouts(self)]

    def param_groups(self) -> ParamGroups:
        """Return the official rule: no weight decay for biases and vectors; class token and positions are decayed."""
        no_decay = {n for n, p in self.named_parameters() if n.endswith(".bias") or p.ndim == 1}
        queries = {n for n, _ in self.named_parameters() if n.endswith(".q_emb")}
        return replace(
            super().param_groups(),
            no_decay=no_decay if self.config.decay_queries else no_decay | queries,
            unclipped=set() if self.config.clip_queries else queries,
            layer_ids=self.layer_ids(),
            norm_groups={name: part for name, part in self.student.named_children() if part is not None},
        )

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m, crops = self.config.model, self.config.crops
        large, small = (1 + (side // m.patch_size) ** 2 for side in (m.image_size, crops.local_size))
        tokens = {"global crop": large} | ({"local crop": small} if crops.local_crops_number else {})
        views, written, towers = 2 + crops.local_crops_number, 0, []
        if m.timm_model_name is not None:
            sides = [m.image_size] * 2 + [crops.local_size] * crops.local_crops_number
            written = sum(count_written_values(m.timm_model_name, m.image_size, side) for side in sides)
        else:
            # Of the last block, only the class token is kept if nothing else is read.
            patch_loss = self.config.ibot is not None or self.config.gram is not None
            blocks = m.blocks - int(m.readout.kind == "cls" and not patch_loss)
            towers = [((2 * large + crops.local_crops_number * small) * m.width, blocks)]
        # Twice the targets, logits and their gradient.
        loss = 4 * batch * self.config.head.out_dim * (2 * 2 + 2 * views + 4 * self.config.most_masked)
        if self.config.gram is not None:  # the cosines of two networks, their difference and its gradient
            loss += 4 * batch * 2 * (large - 1) ** 2 * 4
        return Footprint(tokens, towers, m.out_width, loss, written)

    def set_grad_checkpointing(self, enable: bool) -> None:
        # The teacher has no backward, so it needs no recomputation.
        self.student.backbone.set_grad_checkpointing(enable)


def _masks(masked: Tensor, crops: int, patches: int) -> Tensor:
    """Return (crops * B, patches) bool, crop after crop, for the masked positions (B, M) among all patches of an image."""
    # One more column takes the positions that only fill a row.
    masks = masked.new_zeros(len(masked), crops * patches + 1, dtype=torch.bool)
    masks.scatter_(1, masked.long(), torch.ones_like(masked, dtype=torch.bool))
    return _by_crop(masks[:, :-1].unflatten(1, (crops, patches)))


def _by_crop(x: Tensor) -> Tensor:
    """Rearrange (B, crops, …) to (crops * B, …), crop after crop."""
    return x.transpose(0, 1).flatten(0, 1)


def _examples(config: DinoObjectiveConfig, data: DataConfig) -> CropExamples:
    model = config.model
    paths = 2 * model.blocks if model.drop_path else 0
    grid = model.image_size // model.patch_size
    masking = None if config.ibot is None else Masking(grid, config.ibot.mask_ratio, config.most_masked)
    plain_size = None if config.gram is None else config.gram.crop_size or model.image_size
    return CropExamples(data, config.crops, model.image_size, paths, DROP_RANGE, masking, plain_size)


METHOD = Method(
    DinoObjectiveConfig,
    DinoObjective,
    _examples,
    check_recipe,
    exports=("dino", "timm", "transformers", "torch", "onnx"),
    choose=choose,
    bands=True,
)
