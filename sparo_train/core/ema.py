"""Exponential moving averages of weights: DINO's teacher, CLIP's averaged weights. The host never waits for the device here.

torch.optim.swa_utils.AveragedModel is not used: on a GPU, only the device knows whether a step was skipped, in which
case the average must not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .accelerator import indices_by_device


@dataclass(frozen=True)
class Follow:
    """Declaration that a module is a moving average of another one (an EMA teacher, averaged weights), or a copy at times.

    Attributes:
        source: dotted name of the module that is averaged.
        decay: name of a method `(progress) -> float | None` that returns the share of itself that the average keeps;
            None leaves it unchanged in this step, and 0 copies the source.
        buffers: copy persistent buffers; False if the average updates its own.
    """

    source: str
    decay: str
    buffers: bool = True


def _pairs(average: nn.Module, model: nn.Module, frozen: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return averaged and source parameters. Frozen ones only if asked for: they are equal in both, and rounding would make them drift."""
    pairs = [
        (_local_tensor(a), _local_tensor(p))
        for a, p in zip(average.parameters(), model.parameters(), strict=True)
        if p.requires_grad or frozen
    ]
    return [a for a, _ in pairs], [p for _, p in pairs]


def _buffers(average: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    persistent_names, theirs = average.state_dict().keys(), dict(model.named_buffers())
    return [(buffer, theirs[name]) for name, buffer in average.named_buffers() if name in persistent_names]


def _local_tensor(p: nn.Parameter) -> Tensor:
    """Return a parameter, or this rank's rows of it: both sides are sharded alike, and one call cannot mix whole and sharded tensors."""
    return p.data.to_local() if isinstance(p.data, DTensor) else p.data


@torch.no_grad()
def update_ema(
    average: nn.Module, model: nn.Module, decay: float, applied: Tensor | None = None, buffers: bool = True
) -> None:
    """Set average = decay * average + (1 - decay) * model, parameter by parameter; a decay of 0 copies frozen parameters, too.

    Args:
        average: module that holds the average.
        model: module that is averaged.
        decay: share of itself that the average keeps.
        applied: 0-d bool, whether the optimizer step was applied; if false, nothing changes. The host does not read it
            on a GPU. None means that the step was applied.
        buffers: copy persistent buffers, which are averages already; False if the average updates its own, like DINO's
            teacher.
    """
    if _host_can_read(applied):
        if applied is not None and not applied:
            return
        for own, theirs in _buffers(average, model) if buffers else ():
            own.copy_(theirs)
        averages, trained = _pairs(average, model, frozen=decay == 0)
        # Update lists of tensors in one call: a model has hundreds, and each would launch its own kernel.
        if averages and decay == 0:
            torch._foreach_copy_(averages, trained)  # pyright: ignore[reportPrivateImportUsage]
        elif averages:
            torch._foreach_mul_(averages, decay)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(averages, trained, alpha=1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        return
    assert applied is not None
    for own, theirs in _buffers(average, model) if buffers else ():
        own.copy_(torch.where(applied, theirs, own))
    all_averages, all_trained = _pairs(average, model, frozen=decay == 0)
    for group in indices_by_device(all_averages):
        averages, trained = [all_averages[i] for i in group], [all_trained[i] for i in group]
        here = applied.to(averages[0].device)
        if decay == 0:
            # Not by the difference, whose rounding would leave a copy that is not exact.
            for own, theirs in zip(averages, trained, strict=True):
                own.copy_(torch.where(here, theirs, own))
            continue
        gain = torch.where(here, 1 - decay, 0.0)
        # Compute the difference first: it is multiplied by zero if nothing was applied, so the average keeps its exact
        # bits.
        delta = torch._foreach_sub(trained, averages)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_mul_(delta, gain.to(averages[0].dtype))  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(averages, delta)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def update_mean(average: Tensor, value: Tensor, momentum: float, applied: Tensor) -> None:
    """Set average = momentum * average + (1 - momentum) * value in place, if the step was applied (see `update_ema`)."""
    if _host_can_read(applied):
        if applied:
            average.mul_(momentum).add_(value, alpha=1 - momentum)
        return
    # Values of a skipped step may not be finite, so they are replaced instead of multiplied by zero.
    average.lerp_(torch.where(applied, value, average), 1 - momentum)


def _host_can_read(applied: Tensor | None) -> bool:
    """Return whether the host can read `applied` without waiting for a device."""
    return applied is None or applied.device.type == "cpu"
