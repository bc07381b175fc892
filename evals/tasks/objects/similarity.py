"""Structural similarity of pictures (Wang et al. 2004), as scikit-image computes it with Gaussian weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_SIDE, _SIGMA = 11, 1.5


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Pictures (n, C, H, W) in 0..1 to (n,), mean over colours and over places where the window of 11 pixels fits; NaN where it fits nowhere."""
    if min(first.shape[-2:]) < _SIDE:
        return first.new_full((len(first),), torch.nan)
    line = torch.arange(_SIDE, dtype=torch.float64, device=first.device) - _SIDE // 2
    weights = torch.exp(-(line**2) / (2 * _SIGMA**2))
    window = (weights[:, None] * weights / weights.sum() ** 2)[None, None]
    # fp64: variances are small differences of large numbers.
    x, y = (table.double().flatten(0, 1)[:, None] for table in (first, second))

    def mean(table: Tensor) -> Tensor:
        return F.conv2d(table, window)

    mx, my = mean(x), mean(y)
    vx, vy, both = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    ssim_map = ((2 * mx * my + c1) * (2 * both + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return ssim_map.flatten(1).mean(1).unflatten(0, first.shape[:2]).mean(1).to(first.dtype)
