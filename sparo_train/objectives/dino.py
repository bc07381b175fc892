"""DINO (Caron et al. 2021) with the CLS token or SPARO: student, teacher, and the cross-entropy between their crops."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..core.config import Frozen, between, field
from ..core.contracts import Batch, Follow, Footprint, Loss, Objective, ParamGroups, Progress
from ..core.distributed import sum_over_ranks
from ..core.ema import update_mean
from ..core.errors import DataError
from ..core.schedules import cosine, linear
from ..data.examples.image_transforms import normalise
from ..data.examples.multi_crop import CropExamples, CropsConfig
from ..data.sources.base import PAIR_KEYS, DataConfig
from ..models.readout import readouts
from ..models.vit import DinoHeadConfig, DinoNet
from ..models.vit_config import DROP_RANGE, IMAGENET_MEAN, IMAGENET_STD, VitConfig
from .method import Method


class Distilled(NamedTuple):
    """Result of the distillation loss.

    Attributes:
        loss: 0-d, with graph.
        entropy: mean entropy of the teacher's targets, in nats.
        kl: mean divergence of the student from the teacher.
    """

    loss: Tensor
    entropy: Tensor
    kl: Tensor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, targets: Tensor, temperature: float) -> Tensor:
        teachers, batch, _ = targets.shape
        crops = len(student) // batch
        # All teachers are targets of local crops, so their sum is computed once.
        total = targets.sum(0) if crops > teachers else None
        pairs = teachers * (crops - 1)
        gradient = torch.empty_like(student)
        loss = targets.new_zeros(())
        for v, (logits, out) in enumerate(
            zip(student.view(crops, batch, -1), gradient.view(crops, batch, -1), strict=True)
        ):
            count, target = teachers, total
            if v < teachers:  # a crop is not its own target
                # With two teachers, the other one is exactly the sum without itself.
                count, target = teachers - 1, targets.sum(0) - targets[v] if teachers > 2 else targets[1 - v]
            assert target is not None
            scaled = logits.to(targets.dtype) / temperature
            top = scaled.logsumexp(-1, keepdim=True)
            loss = loss + count * top.sum() - (target * scaled).sum()
            # Write into the copy of the logits: softmax, target and scale without a fourth tensor.
            out.copy_(scaled.sub_(top).exp_().mul_(count).sub_(target).div_(temperature * pairs * batch))
        ctx.save_for_backward(gradient)
        return loss / (pairs * batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None


def distillation(
    student: Tensor, teacher: Tensor, center: Tensor, teachers: int, student_temp: float, teacher_temp: float
) -> Distilled:
    """Compute DINO's loss of a batch.

    Args:
        student: logits (V * B, K), crop after crop, the global ones first.
        teacher: logits (teachers * B, K) of the global crops; they get no gradient.
        center: (1, K), fp32.
        teachers: number of global crops (two in DINO).
        student_temp, teacher_temp: temperatures of the softmaxes.

    Returns:
        The mean over the batch and the `teachers * (V - 1)` pairs of different crops, computed in fp32 (fp64 stays).
    """
    with torch.no_grad(), torch.autocast(student.device.type, enabled=False):
        # Center before sharpening, as published, so that the temperature does not scale the centre's noise.
        scaled = (teacher.to(center.dtype) - center) / teacher_temp
        logs = scaled.log_softmax(-1)
        targets = logs.exp()
        entropy = -(targets * logs).sum(-1).mean()
    with torch.autocast(student.device.type, enabled=False):
        loss = _CrossEntropy.apply(student, targets.unflatten(0, (teachers, -1)), student_temp)
    assert isinstance(loss, Tensor)
    return Distilled(loss, entropy, loss.detach() - entropy)


class CollapseConfig(Frozen):
    """Thresholds of collapse warnings, as shares of log(out_dim)."""

    entropy: Annotated[tuple[float, float], between(0, 1, rising=True)] = field(
        (0.005, 0.999), "Warn if the teacher's entropy, as a share of its maximum, is outside of this range."
    )
    kl: float = field(0.001, "Warn if the KL divergence between two views is below this.", ge=0)


class DinoObjectiveConfig(Frozen):
    """Options of `main_dino.py` under their names; an epoch has `samples_per_epoch` (or the data's size) / batch size steps, rounded down."""

    kind: Literal["dino"] = field("dino", "Entry of sparo.methods.")
    model: VitConfig = field(VitConfig(), "Backbone of student and teacher.")
    head: DinoHeadConfig = field(DinoHeadConfig(), "Projection head on which the loss is computed.")
    crops: CropsConfig = field(CropsConfig(), "Augmented views of an image.")
    mean: Annotated[tuple[float, float, float], between(-10, 10)] = field(
        IMAGENET_MEAN, "Mean of red, green and blue that is subtracted from pixels in 0..1."
    )
    std: Annotated[tuple[float, float, float], between(1e-6, 100)] = field(
        IMAGENET_STD, "Standard deviation of red, green and blue by which pixels in 0..1 are divided."
    )
    momentum_teacher: float = field(
        0.996, "Initial momentum of the teacher's moving average. A cosine raises it to 1.", ge=0, le=1
    )
    center_momentum: float = field(0.9, "Momentum of the center of the teacher's outputs.", ge=0, le=1)
    student_temp: float = field(0.1, "Temperature of the student's softmax.", gt=0)
    teacher_temp: float = field(0.04, "Temperature of the teacher's softmax after the temperature warm-up.", gt=0)
    warmup_teacher_temp: float = field(
        0.04, "Temperature of the teacher's softmax at the start of the temperature warm-up.", gt=0
    )
    warmup_teacher_temp_epochs: int = field(0, "Epochs of linear warm-up of the teacher's temperature.", ge=0)
    freeze_last_layer: int = field(1, "Epochs at the start in which the prototypes are not updated.", ge=0)
    decay_queries: bool = field(True, "Apply weight decay to SPARO's queries.")
    clip_queries: bool = field(True, "Let optim.clip_per=tensor clip the gradients of SPARO's queries.")
    collapse: CollapseConfig = field(CollapseConfig(), "Thresholds of the warning that representations collapse.")

    @model_validator(mode="after")
    def _crops(self) -> DinoObjectiveConfig:
        if self.crops.local_crops_number and self.crops.local_size < self.model.patch_size:
            raise ValueError(
                f"crops.local_size={self.crops.local_size} is below model.patch_size={self.model.patch_size}"
            )
        return self


class DinoObjective(Objective):
    """DINO: `student` learns to predict the output of `teacher`, its moving average, for other crops of the same image.

    Batches contain `global_crops` (B, G, 3, S, S) uint8, `local_crops` (B, n, 3, s, s) uint8 if there are any, and with
    drop path `drop` (B, G + n, 2 * blocks) int32 below DROP_RANGE. The centre moves once per step, by the mean of the
    teacher's raw logits over the global batch, however many micro-batches and ranks it is split over.
    """

    # The teacher's heads update their own buffers.
    follows: ClassVar[Mapping[str, Follow]] = {"teacher": Follow("student", "momentum", buffers=False)}
    compile_by_default: ClassVar[bool] = True

    mean: Tensor
    std: Tensor
    center: Tensor
    _logit_sums: Tensor

    def __init__(self, config: DinoObjectiveConfig):
        super().__init__()
        self.config = config
        self.student = DinoNet(config.model, config.head)
        # Without gradients from the start, so that neither the optimizer nor the gradient exchange includes it.
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, config.head.out_dim))
        self.register_buffer(
            "_logit_sums", torch.zeros(config.head.out_dim + 1), persistent=False
        )  # sum of logits, and rows
        self.register_buffer("mean", torch.tensor(config.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(3, 1, 1), persistent=False)
        self._step = -1  # progress that `_logit_sums` belongs to

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
        # Only the two global crops, because targets must describe the whole image.
        with torch.no_grad():
            targets = self.teacher(crops[:1], [None])
        logits = self.student(crops, drops[: len(crops)])
        result = distillation(logits, targets, self.center, teachers, c.student_temp, self.teacher_temp(progress))
        self._add_logits(targets, progress.step)
        return Loss(
            result.loss,
            {
                "teacher_entropy": result.entropy,
                "teacher_kl": result.kl,
                "center_norm": self.center.norm(),
            },
        )

    def teacher_temp(self, progress: Progress) -> float:
        """Return the teacher's temperature, which rises by epoch from `warmup_teacher_temp` to `teacher_temp`."""
        c, epoch = self.config, progress.epoch
        warm = c.warmup_teacher_temp_epochs
        return linear(c.warmup_teacher_temp, c.teacher_temp, epoch, warm) if epoch < warm else c.teacher_temp

    def momentum(self, progress: Progress) -> float:
        """Return the teacher's momentum at a step."""
        return cosine(self.config.momentum_teacher, 1.0, progress.step, progress.total_steps)

    @torch.no_grad()
    def _add_logits(self, targets: Tensor, step: int) -> None:
        # Micro-batches of one step add up; the next step begins at zero.
        if step != self._step:  # a skipped step leaves its rows behind
            self._logit_sums.zero_()
            self._step = step
        self._logit_sums[:-1] += targets.sum(0, dtype=self._logit_sums.dtype)
        self._logit_sums[-1] += len(targets)

    @torch.no_grad()
    def after_step(self, progress: Progress, applied: Tensor) -> None:
        """Update the teacher from the student, and the center from the mean of the teacher's logits of this step (Eq. 4)."""
        # Sums and counts, because ranks may hold different numbers of rows.
        sums = sum_over_ranks(self._logit_sums)
        update_mean(self.center, (sums[:-1] / sums[-1])[None], self.config.center_momentum, applied)
        self._step = -1
        super().after_step(progress, applied)

    def frozen_this_step(self, progress: Progress) -> Sequence[nn.Parameter]:
        """Return the prototypes during the first `freeze_last_layer` epochs."""
        frozen = progress.epoch < self.config.freeze_last_layer
        # Early prototypes follow random features; freezing them prevents a collapse (Caron et al., App.).
        return list(self.student.head.last_layer.parameters()) if frozen else []

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        """Return a message if the representation has collapsed to the same output for every image, uniform or one-hot."""
        limits, most = self.config.collapse, math.log(self.config.head.out_dim)
        entropy, kl = facts["teacher_entropy"] / most, facts["teacher_kl"] / most
        low, high = limits.entropy
        if low <= entropy <= high and kl >= limits.kl:
            return None
        return (
            f"the representation collapses: teacher entropy {entropy:.4f} and KL {kl:.5f} of log(out_dim), outside "
            f"{low}..{high} or below {limits.kl} (objective.collapse); a lower optim.lr, a lower objective.teacher_temp (uniform "
            "outputs) or a higher one (one-hot), a larger batch, or a clip_grad_norm help"
        )

    def shard_units(self) -> Sequence[nn.Module]:
        # The teacher's blocks first, because its forward comes first and FSDP2 prefetches in this order.
        return [block for net in (self.teacher, self.student) for block in net.backbone.blocks]

    def compile_units(self) -> Sequence[nn.Module]:
        return [*self.shard_units(), *readouts(self)]

    def remap_encoder_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Load a backbone into both student and teacher."""
        return {f"{net}.backbone.{name}": value for net in ("student", "teacher") for name, value in weights.items()}

    def param_groups(self) -> ParamGroups:
        """Return the official rule: no weight decay for biases and vectors; class token and positions are decayed."""
        no_decay = {n for n, p in self.named_parameters() if n.endswith(".bias") or p.ndim == 1}
        queries = {n for n, _ in self.named_parameters() if n.endswith(".q_emb")}
        return replace(
            super().param_groups(),
            no_decay=no_decay if self.config.decay_queries else no_decay | queries,
            unclipped=set() if self.config.clip_queries else queries,
            layer_ids=self._layer_ids(),
            norm_groups={"backbone": self.student.backbone, "head": self.student.head},
        )

    def _layer_ids(self) -> Mapping[str, int]:
        backbone, found = self.student.backbone, {}
        for name, _ in backbone.named_parameters():
            first, _, rest = name.partition(".")
            stem = first in ("cls_token", "pos_embed", "patch_embed")
            layer = 0 if stem else 1 + int(rest.split(".")[0]) if first == "blocks" else len(backbone.blocks) + 1
            found[f"student.backbone.{name}"] = len(backbone.blocks) + 1 - layer
        return found

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m, crops = self.config.model, self.config.crops
        large, small = (1 + (side // m.patch_size) ** 2 for side in (m.image_size, crops.local_size))
        tokens = {"global crop": large} | ({"local crop": small} if crops.local_crops_number else {})
        views = 2 + crops.local_crops_number
        return Footprint(
            tokens,
            [((2 * large + crops.local_crops_number * small) * m.width, m.blocks)],
            m.out_width,
            4 * batch * self.config.head.out_dim * (2 * 2 + 2 * views),  # twice the targets, logits and their gradient
        )

    def set_grad_checkpointing(self, enable: bool) -> None:
        # The teacher has no backward, so it needs no recomputation.
        self.student.backbone.set_grad_checkpointing(enable)


def _by_crop(x: Tensor) -> Tensor:
    """Rearrange (B, crops, …) to (crops * B, …), crop after crop."""
    return x.transpose(0, 1).flatten(0, 1)


def _examples(config: DinoObjectiveConfig, data: DataConfig) -> CropExamples:
    model = config.model
    return CropExamples(data, config.crops, model.image_size, 2 * model.blocks if model.drop_path else 0, DROP_RANGE)


def _rules(run: Any) -> None:
    for key in PAIR_KEYS:
        if getattr(run.data, key) != type(run.data).model_fields[key].default:
            raise ValueError(
                f"data.{key}: applies to image-text pairs only, not to this objective. Remove it, and use objective.crops."
            )
    if run.objective.head.use_bn and run.micro_batch_size is not None:
        raise ValueError(
            "micro_batch_size: objective.head.use_bn couples the samples of a batch, so the batch cannot be "
            "split. Remove micro_batch_size or objective.head.use_bn."
        )


METHOD = Method(DinoObjectiveConfig, DinoObjective, _examples, _rules, exports=("dino",))
