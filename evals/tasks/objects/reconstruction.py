"""How close reconstructed images are to the originals: MSE, PSNR and SSIM."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..result import Result, bootstrap, percentiles

_SIDE, _SIGMA = 11, 1.5


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity (Wang et al. 2004) of images (n, C, H, W) in 0..1, (n,), as scikit-image computes it.

    The mean is over colours and positions where the window of 11 pixels fits; NaN if it fits nowhere. torchmetrics' values differ by up to
    4e-4, and its import takes 4 s.
    """
    if min(first.shape[-2:]) < _SIDE:
        return first.new_full((len(first),), torch.nan)
    line = torch.arange(_SIDE, dtype=torch.float64, device=first.device) - _SIDE // 2
    weights = torch.exp(-(line**2) / (2 * _SIGMA**2))
    window = (weights[:, None] * weights / weights.sum() ** 2)[None, None]
    # fp64, because variances are small differences of large numbers.
    x, y = (table.double().flatten(0, 1)[:, None] for table in (first, second))

    def mean(table: Tensor) -> Tensor:
        return F.conv2d(table, window)

    mx, my = mean(x), mean(y)
    vx, vy, both = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    ssim_map = ((2 * mx * my + c1) * (2 * both + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return ssim_map.flatten(1).mean(1).unflatten(0, first.shape[:2]).mean(1).to(first.dtype)


def score(errors: np.ndarray, numbers: int, pixels: bool) -> Result:
    """Return means over images of `mse` and, for pixels, `psnr` in dB and `mse_sum`.

    PSNR is computed per image, then averaged (the PSNR of a mean differs). An image without an error counts as 100 dB.
    `mse_sum` is summed over pixels and colours, as reported by Biza et al. (2023).

    Args:
        errors: (n,) mean squared error of each image; for pixels in 0..1.
        numbers: values per image: 3 * S * S, or the number of its features.
        pixels: whether errors are of pixels.
    """
    columns = {"mse": errors.astype(np.float64)}
    if pixels:
        columns |= {
            "psnr": -10 * np.log10(np.maximum(columns["mse"], 1e-10)),
            "mse_sum": columns["mse"] * numbers,
        }
    table = np.stack(list(columns.values()), axis=1)
    draws = bootstrap(table, np.ones_like(table))
    return Result(
        "reconstruction",
        len(errors),
        "psnr" if pixels else "mse",
        {name: float(table[:, i].mean()) for i, name in enumerate(columns)},
        0.0,
        {name: percentiles(draws[:, i]) for i, name in enumerate(columns)},
        {"numbers": numbers, "mean": "over images"},
        {},
        {name: table[:, i].astype(np.float32) for i, name in enumerate(columns)},
    )
