"""Images to rows of patch pixels, for patch embeddings written as matrix products."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F


def patchify(x: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) -> (B, H//patch * W//patch, C * patch * patch), in the order of a convolution's weight; a rest is cut off."""
    rows, columns = x.shape[-2] // patch, x.shape[-1] // patch
    x = x[..., : rows * patch, : columns * patch].reshape(len(x), x.shape[1], rows, patch, columns, patch)
    # Channel before row and column, as a convolution's weight lies in memory.
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def regridded(positions: Tensor, rows: int, columns: int) -> Tensor:
    """Position embeddings (P, d) of a square grid for one of (rows, columns): as they are, or interpolated (bicubic, antialiased, as
    open_clip does for images of another size)."""
    side = math.isqrt(len(positions))
    if (rows, columns) == (side, side):
        return positions
    # As an image of d channels, which is what interpolation takes.
    grid = positions.unflatten(0, (side, side)).permute(2, 0, 1)[None]
    grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=True, align_corners=False)
    return grid[0].flatten(1).T
