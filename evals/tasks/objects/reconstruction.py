"""How near drawn images are to those they were drawn from: MSE and PSNR, image by image."""

from __future__ import annotations

import numpy as np

from ..result import Result, bootstrap, percentiles


def score(errors: np.ndarray, numbers: int, pixels: bool) -> Result:
    """Means over images of `mse` and, of pixels, `psnr` in dB and `mse_sum`.

    Args:
        errors: (n,) squared error of each image, mean over its numbers; of pixels in 0..1.
        numbers: that are drawn of an image: 3 * S * S, or those of its features.

    PSNR is that of each image, then the mean (the PSNR of a mean is another number). An image without an error has none; it
    counts as 100 dB. `mse_sum` is summed over pixels and colours, as Biza et al. (2023) report it.
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
