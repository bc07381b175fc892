"""Batch norm over the batches of all ranks, on any backend (torch's SyncBatchNorm supports GPUs only)."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from ..core.distributed import sum_over_ranks


class _OverRanks(nn.modules.batchnorm._BatchNorm):
    """Mixin that computes the statistics of a training step over all ranks; inputs are (B, C, …)."""

    def normalize(self, x: Tensor) -> Tensor:
        """Return the input normalised by the batch of all ranks, and update the running statistics."""
        # Sums of squares in 16 bits would overflow for wide batches.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        others = [0, *range(2, x.ndim)]
        # One exchange for sums, squares and counts instead of three.
        sums = sum_over_ranks(
            torch.cat([wide.sum(others), wide.square().sum(others), wide.new_full((1,), x.numel() // x.shape[1])])
        )
        mean, square = sums[:-1].view(2, -1) / sums[-1]
        var = square - mean.square()
        with torch.no_grad():
            keep, count = 1 - (self.momentum or 0.1), sums[-1]
            # Running statistics use the unbiased variance, the batch itself the biased one, as in torch.
            for running_stat, batch_stat in ((self.running_mean, mean), (self.running_var, var * count / (count - 1))):
                running_stat.mul_(keep).add_(batch_stat, alpha=1 - keep)  # type: ignore[union-attr]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        shape = (-1, *[1] * (x.ndim - 2))
        scale = self.weight * (var + self.eps).rsqrt()
        return (scale.view(shape) * (wide - mean.view(shape)) + self.bias.view(shape)).to(x.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self.normalize(input) if self.training else super().forward(input)


class GlobalBatchNorm(_OverRanks, nn.BatchNorm1d):
    """Batch norm of (B, C)."""


class GlobalBatchNorm2d(_OverRanks, nn.BatchNorm2d):
    """Batch norm of images."""


class GlobalBatchNormAct2d(_OverRanks, BatchNormAct2d):
    """Batch norm of images, followed by timm's activation."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.training:
            return BatchNormAct2d.forward(self, x)
        whole: Any = self
        return whole.act(whole.drop(self.normalize(x)))


_GLOBAL: dict[type, type] = {nn.BatchNorm2d: GlobalBatchNorm2d, BatchNormAct2d: GlobalBatchNormAct2d}


def make_global(module: nn.Module) -> None:
    """Let all batch norms of images in a module use the batch of all ranks.

    Raises:
        ValueError: it contains another kind of batch norm.
    """
    for part in module.modules():
        if type(part) in _GLOBAL:
            # The same parameters and buffers under the same names, with another forward.
            changed: Any = part
            changed.__class__ = _GLOBAL[type(part)]
        elif isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{type(part).__name__}: normalizes over the batch of one rank only, which is not supported"
            )
