"""Layers of what 16 bits would blur: places, rays, poses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


def in_fp32(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)` in fp32 at least, whatever autocast says, and whatever an engine holds its weights in."""
    with torch.autocast(x.device.type, enabled=False):
        exact = torch.promote_types(x.dtype, torch.float32)
        own = dict(layer.named_parameters())
        if all(p.dtype.itemsize >= 4 for p in own.values()):
            return layer(x.to(exact))
        return functional_call(layer, {name: p.to(exact) for name, p in own.items()}, x.to(exact))


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast 16-bit numbers to fp32, whose sums and softmaxes keep small differences; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
