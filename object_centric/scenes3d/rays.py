"""Rays of cameras, and what networks are told of them; nothing of it is stored, all follows from poses."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from sparo_train.core.config import Frozen, field


class Rays(NamedTuple):
    """origins, directions (n, R, 3), directions of length one.  offsets: (n, R) in 0..1, where in its bins a ray is looked at; None: in
    their middles."""

    origins: Tensor
    directions: Tensor
    offsets: Tensor | None = None

    def chunk(self, begin: int, end: int) -> Rays:
        """These rays of every row."""
        return Rays(*(None if table is None else table[:, begin:end] for table in self))  # type: ignore[arg-type]


class Bounds(NamedTuple):
    """Between which distances rays are looked at, and in which box (its lower corner, its upper one), where there is one; world units."""

    near: float
    far: float
    box: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None

    def near_far(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Where rays (…, 3) begin and end to be looked at, (…); both are one where a ray misses the box."""
        near, far = (torch.full_like(origins[..., 0], distance) for distance in (self.near, self.far))
        if self.box is None:
            return near, far
        # Along an axis a ray never leaves the box sideways: a slope of almost nothing says so without a division by it.
        safe = torch.where(directions < 0, -1.0, 1.0) * directions.abs().clamp(min=1e-9)
        low, high = ((origins.new_tensor(corner) - origins) / safe for corner in self.box)
        into, out = torch.minimum(low, high).amax(-1), torch.maximum(low, high).amin(-1)
        near = torch.minimum(torch.maximum(near, into), far)
        return near, torch.maximum(near, torch.minimum(far, out))

    def intersects(self, poses: Tensor, lens: Tensor, side: int) -> bool:
        """Whether one ray at least of these views (…, 4, 4), (…, 4), whose pictures have `side` pixels, is looked at somewhere."""
        # Sixteen by sixteen of a view: a box between all of them would teach nothing either.
        origins, directions = pixel_rays(poses, lens * (16 / side), 16).split(3, -1)
        near, far = self.near_far(origins, directions)
        return bool((far > near).any())


def common_point(eyes: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """(3,): the point that the axes of cameras at (V, 3), which look along unit (V, 3), come nearest to; of one camera the point of its axis
    that is nearest to the origin."""
    if len(eyes) == 1:
        return eyes[0] - (eyes[0] @ ahead[0]) * ahead[0]
    off = np.eye(3) - ahead[:, :, None] * ahead[:, None]
    # Least squares: axes of real cameras do not meet in a point.
    return np.linalg.lstsq(off.sum(0), (off @ eyes[..., None]).sum(0)[:, 0], rcond=None)[0]


def camera_rays(poses: Tensor, lens: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
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
    # To length one behind the turn: a rounded rotation changes lengths.
    directions = turned / turned.norm(dim=-1, keepdim=True)
    return poses[..., None, :3, 3].expand_as(directions), directions


def pixel_rays(poses: Tensor, lens: Tensor, side: int) -> Tensor:
    """(…, side, side, 6): origin and unit direction of the ray through every pixel's middle."""
    line = torch.arange(side, device=poses.device, dtype=poses.dtype) + 0.5
    rows, columns = (x.flatten().expand(*poses.shape[:-2], -1) for x in torch.meshgrid(line, line, indexing="ij"))
    return torch.cat(camera_rays(poses, lens, columns, rows), dim=-1).unflatten(-2, (side, side))


def fourier_features(x: Tensor, count: int, start: int = 0) -> Tensor:
    """Sines, then cosines, of pi times 2^start, 2^(start + 1), … of every number: (…, c) to (…, 2 * c * count), as SRT has them: a number's
    octaves beside each other."""
    # In the type that came: sines of 2^15 times a number in 16 bits are noise.
    rates = torch.pi * 2.0 ** torch.arange(start, start + count, device=x.device, dtype=x.dtype)
    angles = (x[..., None] * rates).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def ray_fourier_features(origins: Tensor, directions: Tensor, count: int, start: int = 0) -> Tensor:
    """A ray's origin, whose octaves begin at `start`, and its direction: (…, 12 * count)."""
    return torch.cat([fourier_features(origins, count, start), fourier_features(directions, count)], dim=-1)


def positional_encoding(x: Tensor, octaves: int, reach: float) -> Tensor:
    """Sine and cosine of pi * 2^i / reach times every coordinate, i from 0: (…, c) to (…, 2 * c * octaves), a rate's two beside each other."""
    rates = torch.pi / reach * 2.0 ** torch.arange(octaves, device=x.device, dtype=x.dtype)
    angles = x[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


class RayPointsConfig(Frozen):
    """Places along a ray, by which networks are told of it: at distances (Liu et al. 2022, PETR), or at heights (a light slab, Levoy and
    Hanrahan 1996), where what stands on the ground is at one place for all cameras."""

    by: Literal["distance", "height"] = field(
        "distance",
        "distance: near and far are distances from the camera. height: heights above z = 0, for cameras that look "
        "down; a point is then x and y.",
    )
    near: float = field(0.5, "First point, in world units.")
    far: float = field(20.0, "Last point, in world units.")
    count: int = field(8, "Number of points, evenly spaced.", gt=1, le=1024)
    reach: float = field(
        10.0, "Largest coordinate: half the period of the slowest sine. Coordinates are clipped to it.", gt=0
    )
    fourier_bands: int = field(
        6,
        "Sines and cosines of each coordinate, in addition to the coordinate. Each has half the period of the one before.",
        ge=0,
        le=30,
    )

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.far <= self.near:
            raise ValueError(f"far={self.far}: has to lie behind near={self.near}")
        if self.by == "distance" and self.near < 0:
            raise ValueError(f"near={self.near}: lies behind the camera")
        return self

    @property
    def width(self) -> int:
        return self.count * (3 if self.by == "distance" else 2) * (1 + 2 * self.fourier_bands)

    def embed(self, origins: Tensor, directions: Tensor) -> Tensor:
        """Rays (…, 3) to what is told of them, (…, width)."""
        places = torch.linspace(self.near, self.far, self.count, device=origins.device, dtype=origins.dtype)
        if self.by == "height":
            down = directions[..., 2:]
            # A level ray meets no height: it is held to meet them far away, where the clamp below takes it.
            places = (places - origins[..., 2:]) / torch.where(down < 0, -1.0, 1.0) / down.abs().clamp(min=1e-3)
        at = origins[..., None, :] + places[..., None] * directions[..., None, :]
        at = (at[..., :2] if self.by == "height" else at).clamp(-self.reach, self.reach)
        return torch.cat(
            [at.flatten(-2) / self.reach, positional_encoding(at, self.fourier_bands, self.reach).flatten(-2)], dim=-1
        )


class RayEmbeddingConfig(Frozen):
    """What decoders of whole rays are told of one."""

    fourier_bands: int = field(15, "Fourier features of a ray's origin and direction, in octaves.", gt=0, le=30)
    fourier_start: int = field(0, "First octave of origins, whose range is that of the scene.", ge=-20, le=20)
    points: RayPointsConfig | None = field(
        None,
        "Points along a ray, embedded instead of its origin and direction. Default: none.",
        examples=[{"near": 4.0, "far": 16.0}],
    )

    @property
    def embed_width(self) -> int:
        return 12 * self.fourier_bands if self.points is None else self.points.width

    def embed(self, rays: Rays) -> Tensor:
        """(n, R, embed_width)."""
        with torch.autocast(rays.origins.device.type, enabled=False):
            if self.points is not None:
                return self.points.embed(rays.origins, rays.directions)
            return ray_fourier_features(rays.origins, rays.directions, self.fourier_bands, self.fourier_start)
