"""Cross-entropy between the teacher's and the student's crops (Caron et al. 2021, Eq. 3), in one pass over the student's logits.

The published code computes a log-softmax of every student crop once per teacher crop. The sum over teachers can be
taken first: for student crop v with T_v = sum of the teachers q != v, of which there are n_v,

    sum_q -T_q . log_softmax(s_v / tau) = n_v * logsumexp(s_v / tau) - T_v . s_v / tau

and its gradient with respect to s_v is (n_v * softmax(s_v / tau) - T_v) / tau, written in the forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Distilled(NamedTuple):
    """`loss`: 0-d, with graph. `entropy`: of the teacher's targets, mean, in nats. `kl`: of the student from the teacher, mean."""

    loss: Tensor
    entropy: Tensor
    kl: Tensor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, targets: Tensor, temperature: float) -> Tensor:
        teachers, batch, _ = targets.shape
        crops = len(student) // batch
        # Local crops have all teachers as targets, so their sum is taken once.
        total = targets.sum(0) if crops > teachers else None
        pairs = teachers * (crops - 1)
        gradient = torch.empty_like(student)
        loss = targets.new_zeros(())
        for v, (logits, out) in enumerate(
            zip(student.view(crops, batch, -1), gradient.view(crops, batch, -1), strict=True)
        ):
            count, target = teachers, total
            if v < teachers:  # a crop does not teach itself
                # Of two teachers the other one is the sum without itself, to the bit.
                count, target = teachers - 1, targets.sum(0) - targets[v] if teachers > 2 else targets[1 - v]
            assert target is not None
            scaled = logits.to(targets.dtype) / temperature
            top = scaled.logsumexp(-1, keepdim=True)
            loss = loss + count * top.sum() - (target * scaled).sum()
            # Written over the logits' own copy: softmax, target and scale without a fourth tensor.
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
    """DINO's loss of a batch.

    Args:
        student: logits (V * B, K), crop after crop, the global ones first.
        teacher: logits (teachers * B, K) of the global crops; no gradient goes into it.
        center: (1, K), fp32.
        teachers: number of global crops (two in DINO).

    Returns:
        the mean over the batch and the `teachers * (V - 1)` pairs of different crops; computed in fp32 (fp64 stays).
    """
    with torch.no_grad(), torch.autocast(student.device.type, enabled=False):
        # Centred before it is sharpened, as published: the temperature must not scale the centre's noise.
        scaled = (teacher.to(center.dtype) - center) / teacher_temp
        logs = scaled.log_softmax(-1)
        targets = logs.exp()
        entropy = -(targets * logs).sum(-1).mean()
    with torch.autocast(student.device.type, enabled=False):
        loss = _CrossEntropy.apply(student, targets.unflatten(0, (teachers, -1)), student_temp)
    assert isinstance(loss, Tensor)
    return Distilled(loss, entropy, loss.detach() - entropy)
