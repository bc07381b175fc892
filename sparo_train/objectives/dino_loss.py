"""Losses of DINO."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
