"""Running mean and standard deviation of features, by which a teacher's tokens are standardised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.distributed import sum_over_ranks

_LONGEST = 1000.0  # most steps over which statistics are averaged


class RunningMoments(nn.Module):
    """Mean and mean square per channel over all steps, or about the last 1,000.

    Rows of micro-batches and ranks are summed before the mean is taken, so the statistics do not depend on how a batch
    is split. The host never waits for the device.

    Args:
        width: number of channels.
    """

    mean: Tensor
    square: Tensor
    count: Tensor
    _sums: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("square", torch.ones(width))
        self.register_buffer("count", torch.zeros(()))  # of updates
        self.register_buffer("_sums", torch.zeros(2, width), persistent=False)
        self.register_buffer("_rows", torch.zeros(()), persistent=False)

    def clear(self) -> None:
        """Forget rows that were added in a step that was not applied."""
        self._sums.zero_()
        self.get_buffer("_rows").zero_()

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add rows (…, width) to the statistics of this step."""
        rows = x.flatten(0, -2).to(self._sums.dtype)
        self._sums[0] += rows.sum(0)
        self._sums[1] += rows.square().sum(0)
        self.get_buffer("_rows").add_(len(rows))

    def standardise(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std, by the statistics of earlier steps, in their dtype."""
        std = (self.square - self.mean.square()).clamp(min=1e-6).sqrt()
        return (x.to(self.mean.dtype) - self.mean) / std

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Include the rows of this step, if the step was applied (0-d bool)."""
        totals = sum_over_ranks(torch.cat([self._sums.flatten(), self.get_buffer("_rows")[None]]))
        means = totals[:-1].unflatten(0, (2, -1)) / totals[-1].clamp(min=1)
        share = torch.where(applied, 1 / (self.count + 1).clamp(max=_LONGEST), 0.0).to(self.mean.dtype)
        for own, value in zip((self.mean, self.square), means, strict=True):
            # Rows of a skipped step may not be finite, so they are replaced instead of multiplied by zero.
            own.lerp_(torch.where(applied, value, own), share)
        self.count += applied.to(self.count.dtype)
        self.clear()
