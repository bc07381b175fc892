"""Rays of cameras and their embeddings, all computed from poses."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from sparo_train.core.config import Frozen, field


class Rays(NamedTuple):
    """Rays with origins and unit directions (n, R, 3); offsets: (n, R) in 0..1, positions in the bins of a ray; None: their centres."""

    origins: Tensor
    directions: Tensor
    offsets: Tensor | None = None

    def chunk(self, begin: int, end: int) -> Rays:
        """Return these rays of every row."""
        return Rays(*(None if table is None else table[:, begin:end] for table in self))  # type: ignore[arg-type]


class Bounds(NamedTuple):
    """Range of distances in which rays are sampled, and an optional box (lower corner, upper corner); world units."""

    near: float
    far: float
    box: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None

    def near_far(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return where sampling of rays (…, 3) begins and ends, (…); both are one if a ray misses the box."""
        near, far = (torch.full_like(origins[..., 0], distance) for distance in (self.near, self.far))
        if self.box is None:
            return near, far
        # A ray parallel to an axis never leaves the box sideways: a tiny slope gives that without a division by zero.
        safe = torch.where(directions < 0, -1.0, 1.0) * directions.abs().clamp(min=1e-9)
        low, high = ((origins.new_tensor(corner) - origins) / safe for corner in self.box)
        into, out = torch.minimum(low, high).amax(-1), torch.maximum(low, high).amin(-1)
        near = torch.minimum(torch.maximum(near, into), far)
        return near, torch.maximum(near, torch.minimum(far, out))

    def intersects(self, poses: Tensor, lens: Tensor, side: int) -> bool:
        """Return whether at least one ray of these views (…, 4, 4), (…, 4) with `side` pixels per side is sampled."""
        # 16 x 16 rays per view: a box between all of them would teach nothing either.
        origins, directions = pixel_rays(poses, lens * (16 / side), 16).split(3, -1)
        near, far = self.near_far(origins, directions)
        return bool((far > near).any())


def common_point(eyes: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Return (3,), the point nearest to the axes of cameras at (V, 3) with unit directions (V, 3).

    For a single camera, it is the point of the axis that is nearest to the origin.
    """
    if len(eyes) == 1:
        return eyes[0] - (eyes[0] @ ahead[0]) * ahead[0]
    off = np.eye(3) - ahead[:, :, None] * ahead[:, None]
    # Least squares, because axes of real cameras do not meet in a point.
    return np.linalg.lstsq(off.sum(0), (off @ eyes[..., None]).sum(0)[:, 0], rcond=None)[0]


def camera_rays(poses: Tensor, lens: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return origins and unit directions (…, R, 3) of the rays through points (…, R) of images, in pixels from the upper left corner.

    Args:
        poses: (…, 4, 4), OpenGL's.
        lens: (…, 4), fx, fy, cx, cy.
        columns, rows: (…, R).
    """
    fx, fy, cx, cy = (part[..., None] for part in lens.unbind(-1))
    own = torch.stack(
        [(columns - cx) / fx, (cy - rows) / fy, -torch.ones_like(columns)], dim=-1
    )  # y is up, rows go down
    with torch.autocast(poses.device.type, enabled=False):  # in bf16, a direction would be off by a pixel or two
        turned = own @ poses[..., :3, :3].transpose(-1, -2)
    # Normalize after the rotation, because a rounded rotation changes lengths.
    directions = turned / turned.norm(dim=-1, keepdim=True)
    return poses[..., None, :3, 3].expand_as(directions), directions


def pixel_rays(poses: Tensor, lens: Tensor, side: int) -> Tensor:
    """Return (…, side, side, 6): origin and unit direction of the ray through the centre of every pixel."""
    line = torch.arange(side, device=poses.device, dtype=poses.dtype) + 0.5
    rows, columns = (x.flatten().expand(*poses.shape[:-2], -1) for x in torch.meshgrid(line, line, indexing="ij"))
    return torch.cat(camera_rays(poses, lens, columns, rows), dim=-1).unflatten(-2, (side, side))


def fourier_features(x: Tensor, count: int, start: int = 0) -> Tensor:
    """Return sines, then cosines, of pi times 2^start, 2^(start + 1), … of every value: (…, c) to (…, 2 * c * count).

    The octaves of a value are next to each other, as in SRT.
    """
    # In the input's dtype: sines of 2^15 times a 16-bit value are noise.
    rates = torch.pi * 2.0 ** torch.arange(start, start + count, device=x.device, dtype=x.dtype)
    angles = (x[..., None] * rates).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def ray_fourier_features(origins: Tensor, directions: Tensor, count: int, start: int = 0) -> Tensor:
    """Return features of a ray's origin, whose octaves begin at `start`, and of its direction: (…, 12 * count)."""
    return torch.cat([fourier_features(origins, count, start), fourier_features(directions, count)], dim=-1)


def positional_encoding(x: Tensor, octaves: int, reach: float) -> Tensor:
    """Return sine and cosine of pi * 2^i / reach times every coordinate, i from 0: (…, c) to (…, 2 * c * octaves), both of a frequency adjacent."""
    rates = torch.pi / reach * 2.0 ** torch.arange(octaves, device=x.device, dtype=x.dtype)
    angles = x[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


class RayPointsConfig(Frozen):
    """Points along a ray that represent it: at distances (Liu et al. 2022, PETR), or at heights (a light slab, Levoy and Hanrahan 1996).

    At heights, an object on the ground has the same position for all cameras.
    """

    by: Literal["distance", "height"] = field(
        "distance",
        "Meaning of `near` and `far`. distance: distance from the camera. height: height above z = 0, for cameras "
        "that look down. With `distance`, points are encoded by x, y and z; with `height`, by x and y.",
    )
    near: float = field(0.5, "Distance or height of the first point of a ray, in world units (see `by`).")
    far: float = field(20.0, "Distance or height of the last point of a ray, in world units (see `by`).")
    count: int = field(8, "Number of points, evenly spaced.", gt=1, le=1024)
    reach: float = field(
        10.0,
        "Coordinates are clipped to -reach..reach, in world units. The slowest sine has the period 2 * reach.",
        gt=0,
    )
    fourier_bands: int = field(
        6,
        "Number of sine-cosine pairs that encode each coordinate, in addition to the coordinate itself. Each "
        "pair has half the period of the previous pair.",
        ge=0,
        le=30,
    )

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.far <= self.near:
            raise ValueError(f"far={self.far}: must exceed near={self.near}")
        if self.by == "distance" and self.near < 0:
            raise ValueError(f"near={self.near}: is behind the camera")
        return self

    @property
    def width(self) -> int:
        return self.count * (3 if self.by == "distance" else 2) * (1 + 2 * self.fourier_bands)

    def embed(self, origins: Tensor, directions: Tensor) -> Tensor:
        """Embed rays (…, 3) to (…, width)."""
        places = torch.linspace(self.near, self.far, self.count, device=origins.device, dtype=origins.dtype)
        if self.by == "height":
            down = directions[..., 2:]
            # A level ray meets no height; it is treated as meeting one far away, where the clamp below applies.
            places = (places - origins[..., 2:]) / torch.where(down < 0, -1.0, 1.0) / down.abs().clamp(min=1e-3)
        at = origins[..., None, :] + places[..., None] * directions[..., None, :]
        at = (at[..., :2] if self.by == "height" else at).clamp(-self.reach, self.reach)
        return torch.cat(
            [at.flatten(-2) / self.reach, positional_encoding(at, self.fourier_bands, self.reach).flatten(-2)], dim=-1
        )


class RayEmbeddingConfig(Frozen):
    """Embedding of a ray for decoders of whole rays."""

    fourier_bands: int = field(
        15, "Number of octaves of Fourier features of a ray's origin and direction.", gt=0, le=30
    )
    fourier_start: int = field(
        0,
        "First octave of the Fourier features of ray origins. Use a negative value for large scenes, because "
        "origins are in world units.",
        ge=-20,
        le=20,
    )
    points: RayPointsConfig | None = field(
        None,
        "Points along each ray, which are embedded instead of the ray's origin and direction. Default: origin and direction.",
        examples=[{"near": 4.0, "far": 16.0}],
    )

    @property
    def embed_width(self) -> int:
        return 12 * self.fourier_bands if self.points is None else self.points.width

    def embed(self, rays: Rays) -> Tensor:
        """Return embeddings (n, R, embed_width)."""
        with torch.autocast(rays.origins.device.type, enabled=False):
            if self.points is not None:
                return self.points.embed(rays.origins, rays.directions)
            return ray_fourier_features(rays.origins, rays.directions, self.fourier_bands, self.fourier_start)
