"""Losses of DINO and DINOv2: targets, distillation of views and of masked patches, KoLeo."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.distributed import gather_rows, sum_over_ranks
from ..core.first_order import first_order


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
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, targets: Tensor, weights: Tensor, temperature: float) -> Tensor:
        scaled = student.to(targets.dtype) / temperature
        top = scaled.logsumexp(-1, keepdim=True)
        loss = ((top[:, 0] - (targets * scaled).sum(-1)) * weights).sum()
        # As in _CrossEntropy: softmax, target and weight without another tensor of this size.
        gradient = scaled.sub_(top).exp_().sub_(targets).mul_(weights[:, None] / temperature)
        ctx.save_for_backward(gradient.to(student.dtype))
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None


class Targets(NamedTuple):
    """The teacher's distributions over prototypes (N, K), without graph, and their mean entropy in nats."""

    values: Tensor
    entropy: Tensor


def centered_targets(teacher: Tensor, center: Tensor, temperature: float, valid: Tensor | None = None) -> Targets:
    """Return softmax((teacher - center) / temperature) of logits (N, K) (Caron et al. 2021, Eq. 4).

    Args:
        teacher: logits.
        center: (1, K), fp32; the result has its type.
        temperature: of the softmax.
        valid: (N,) bool, rows that count in the entropy; None: all.
    """
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        # Center before sharpening, as published, so that the temperature does not scale the centre's noise.
        scaled = (teacher.to(center.dtype) - center) / temperature
        logs = scaled.log_softmax(-1)
        targets = logs.exp()
        return Targets(targets, _mean(-(targets * logs).sum(-1), valid))


def sinkhorn_targets(teacher: Tensor, temperature: float, valid: Tensor | None = None, iterations: int = 3) -> Targets:
    """Return targets in which all prototypes have the same share of the global batch (Caron et al. 2020; DINOv2's centering).

    Args:
        teacher: logits (N, K) of this rank; they are normalised over the rows of all ranks.
        temperature: of the softmax.
        valid: (N,) bool, rows that count; None: all.
        iterations: alternating normalisations of prototypes and rows.
    """
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        precise = torch.promote_types(teacher.dtype, torch.float32)
        shares = (teacher.to(precise) / temperature).exp()
        if valid is not None:
            shares = shares * valid[:, None]
        rows, prototypes = shares.new_ones(len(shares)) if valid is None else valid.to(precise), shares.shape[1]
        # One exchange for the number of rows and the sum.
        count, total = sum_over_ranks(torch.stack([rows.sum(), shares.sum()]))
        shares = shares / total
        for _ in range(iterations):
            shares = shares / (sum_over_ranks(shares.sum(0)) * prototypes)
            # Rows that do not count are zero and stay it.
            shares = shares / (shares.sum(1, keepdim=True).clamp(min=torch.finfo(precise).tiny) * count)
        shares = shares * count
        return Targets(shares, _mean(-torch.xlogy(shares, shares).sum(-1), valid))


def distillation(student: Tensor, targets: Targets, teachers: int, student_temp: float) -> Distilled:
    """Compute DINO's loss of a batch.

    Args:
        student: logits (V * B, K), crop after crop, the global ones first.
        targets: the teacher's (teachers * B, K) for the global crops.
        teachers: number of global crops (two in DINO).
        student_temp: temperature of the softmax.

    Returns:
        The mean over the batch and the `teachers * (V - 1)` pairs of different crops, computed in fp32 (fp64 stays).
    """
    with torch.autocast(student.device.type, enabled=False):
        loss = _CrossEntropy.apply(student, targets.values.unflatten(0, (teachers, -1)), student_temp)
    assert isinstance(loss, Tensor)
    return Distilled(loss, targets.entropy, loss.detach() - targets.entropy)


def masked_distillation(student: Tensor, targets: Targets, weights: Tensor, student_temp: float) -> Tensor:
    """Return iBOT's loss (Zhou et al. 2022, Eq. 2): the weighted sum of the cross-entropies of masked patches, 0-d.

    Args:
        student: logits (N, K) of masked patches.
        targets: the teacher's for the same patches, which it sees.
        weights: (N,), zero for rows that only fill the batch.
        student_temp: temperature of the softmax.
    """
    with torch.autocast(student.device.type, enabled=False):
        loss = _WeightedCrossEntropy.apply(student, targets.values, weights, student_temp)
    assert isinstance(loss, Tensor)
    return loss


def koleo(x: Tensor) -> Tensor:
    """Return the KoLeo loss (Sablayrolles et al. 2019; DINOv2), 0-d: minus the mean log distance of each row to the nearest one.

    Args:
        x: encodings (B, D) of this rank, which are normalised here. Nearest rows are searched in those of all ranks.
    """
    with torch.autocast(x.device.type, enabled=False):
        own = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=1e-8)
        every, first = gather_rows(own)
        with torch.no_grad():
            similarity = own @ every.T
            similarity.diagonal(first).fill_(-1)
            nearest = similarity.argmax(1)
        # As torch's pairwise distance, which adds epsilon to the difference.
        return -((own - every[nearest] + 1e-8).norm(dim=-1) + 1e-8).log().mean()


def gram(student: Tensor, earlier: Tensor) -> Tensor:
    """Return DINOv3's Gram loss (Siméoni et al. 2025), 0-d: the mean squared difference of the cosines between patches of an image.

    Args:
        student: patches (B, N, D) of a square grid.
        earlier: patches (B, M, D) of the same crops, without graph; another grid is resized to the student's.
    """
    with torch.autocast(student.device.type, enabled=False):
        precise = torch.promote_types(student.dtype, torch.float32)
        earlier = earlier.to(precise)
        if earlier.shape[1] != student.shape[1]:
            side, target = (math.isqrt(x.shape[1]) for x in (earlier, student))
            grid = earlier.transpose(1, 2).unflatten(2, (side, side))
            grid = F.interpolate(grid, (target, target), mode="bicubic", align_corners=False)
            earlier = grid.flatten(2).transpose(1, 2)
        own, theirs = (F.normalize(x, dim=-1) for x in (student.to(precise), earlier))
        return F.mse_loss(own @ own.transpose(1, 2), theirs @ theirs.transpose(1, 2))


def _mean(values: Tensor, valid: Tensor | None) -> Tensor:
    return values.mean() if valid is None else (values * valid).sum() / valid.sum().clamp(min=1)
