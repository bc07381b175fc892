"""Rays of cameras, and what networks are told of them; nothing of it is stored, all follows from poses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rays(NamedTuple):
    """origins, directions (n, R, 3), directions of length one.  offsets: (n, R) in 0..1, where in its bins a ray is looked at; None: in
    their middles."""

    origins: Tensor
    directions: Tensor
    offsets: Tensor | None = None

    def chunk(self, begin: int, end: int) -> Rays:
        """These rays of every row."""
        return Rays(*(None if table is None else table[:, begin:end] for table in self))  # type: ignore[arg-type]


def rays_at(poses: Tensor, lens: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Origins and unit directions (…, R, 3) of the rays through points (…, R) of pictures, in pixels from the upper left corner.

    Args:
        poses: (…, 4, 4), OpenGL's.  lens: (…, 4), fx, fy, cx, cy.
    """
    fx, fy, cx, cy = (part[..., None] for part in lens.unbind(-1))
    own = torch.stack(
        [(columns - cx) / fx, (cy - rows) / fy, -torch.ones_like(columns)], dim=-1
    )  # y is up, rows go down
    with torch.autocast(poses.device.type, enabled=False):  # in bf16 a direction would be off by a pixel or two
        turned = own @ poses[..., :3, :3].transpose(-1, -2)
    directions = turned / turned.norm(dim=-1, keepdim=True)
    return poses[..., None, :3, 3].expand_as(directions), directions


def pixel_rays(poses: Tensor, lens: Tensor, side: int) -> Tensor:
    """(…, side, side, 6): origin and unit direction of the ray through every pixel's middle."""
    line = torch.arange(side, device=poses.device, dtype=poses.dtype) + 0.5
    rows, columns = (x.flatten().expand(*poses.shape[:-2], -1) for x in torch.meshgrid(line, line, indexing="ij"))
    return torch.cat(rays_at(poses, lens, columns, rows), dim=-1).unflatten(-2, (side, side))


def octaves(x: Tensor, count: int, start: int = 0) -> Tensor:
    """Sines, then cosines, of pi times 2^start, 2^(start + 1), … of every number: (…, c) to (…, 2 * c * count), as SRT has them: a number's
    octaves beside each other."""
    rates = torch.pi * 2.0 ** torch.arange(start, start + count, device=x.device, dtype=x.dtype)
    angles = (x[..., None] * rates).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def ray_octaves(origins: Tensor, directions: Tensor, count: int, start: int = 0) -> Tensor:
    """A ray's origin, whose octaves begin at `start`, and its direction: (…, 12 * count)."""
    return torch.cat([octaves(origins, count, start), octaves(directions, count)], dim=-1)
