"""The ranks of a process group as a ring: what one sends on, the next receives, and after a round everything is home."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Shift:
    """Tensors on their way; `wait` returns those that arrive from the previous rank."""

    def __init__(self, work: list[Any], arriving: tuple[Tensor, ...], leaving: tuple[Tensor, ...]):
        self._work, self._arriving, self._leaving = work, arriving, leaving  # what leaves must live until it has left

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._work:
            work.wait()
        self._leaving = ()
        return self._arriving


class Ring:
    """A ring over a process group; of one rank where torch.distributed is not initialised.

    Args:
        group: the process group; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        single_process = not (dist.is_available() and dist.is_initialized())
        self.rank, self.size = (0, 1) if single_process else (dist.get_rank(group), dist.get_world_size(group))

    def shift(self, *tensors: Tensor) -> Shift:
        """Start sending to the next rank and receiving the same shapes from the previous one. All ranks call it alike."""
        if self.size == 1:
            return Shift([], tensors, ())
        to, source = ((self.rank + step) % self.size for step in (1, -1))
        # A view's strides would be sent as its neighbours' elements.
        leaving = tuple(t.contiguous() for t in tensors)
        arriving = tuple(torch.empty_like(t) for t in leaving)
        operations = []
        for out, into in zip(leaving, arriving, strict=True):
            operations.append(dist.P2POp(dist.isend, out, group=self.group, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=source))
        return Shift(dist.batch_isend_irecv(operations), arriving, leaving)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, concatenated in the order of ranks; with gradient (the sum of what the ranks ask for)."""
        return tensor if self.size == 1 else _Gather.apply(tensor, self)  # type: ignore[return-value]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of the ranks' tensors, new; its gradient is the sum of the ranks' gradients."""
    return _Sum.apply(tensor)  # pyright: ignore[reportReturnType]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        if Ring().size > 1:
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum_over_ranks(gradients[0])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: Ring) -> Tensor:
        ctx.ring, ctx.length = ring, len(tensor)
        parts = [torch.empty_like(tensor) for _ in range(ring.size)]
        dist.all_gather(parts, tensor.contiguous(), group=ring.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Each rank asked for something of every rank's tensor: what they ask of this one is summed.
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.ring.group)
        return whole[ctx.ring.rank * ctx.length :][: ctx.length].clone(), None
