"""Layers that several models share: patch embedding as a matrix product, and layers that stay in fp32 under autocast."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


def patchify(x: Tensor, patch: int) -> Tensor:
    """Cut (B, C, H, W) into (B, H//patch * W//patch, C * patch * patch), in the order of a convolution's weight; a remainder is cut off."""
    rows, columns = x.shape[-2] // patch, x.shape[-1] // patch
    x = x[..., : rows * patch, : columns * patch].reshape(x.shape[0], x.shape[1], rows, patch, columns, patch)
    # Channel before row and column, as in the memory of a convolution's weight.
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def interpolate_positions(positions: Tensor, rows: int, columns: int) -> Tensor:
    """Interpolate position embeddings (P, d) of a square grid to (rows, columns): bicubic, antialiased, as in open_clip; unchanged if equal."""
    side = math.isqrt(len(positions))
    if (rows, columns) == (side, side):
        return positions
    # As an image with d channels, the input format of interpolation.
    grid = positions.unflatten(0, (side, side)).permute(2, 0, 1)[None]
    grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=True, align_corners=False)
    return grid[0].flatten(1).T


def in_fp32(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute `layer(x)` in fp32 at least, whatever autocast's dtype and whatever dtype an engine's weights have."""
    with torch.autocast(x.device.type, enabled=False):
        exact = torch.promote_types(x.dtype, torch.float32)
        own = dict(layer.named_parameters())
        if all(p.dtype.itemsize >= 4 for p in own.values()):
            return layer(x.to(exact))
        return functional_call(layer, {name: p.to(exact) for name, p in own.items()}, x.to(exact))


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast 16-bit values to fp32, whose sums and softmaxes keep small differences; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
