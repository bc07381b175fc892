"""A small ray tracer in numpy: the solids of `solids.py` on a plane, one light with shadows, matte and metal.

World units, z up, the ground at z = 0. Everything is fp32 and deterministic. A frame is a pure function of its objects
and camera, so stills and video use the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from .solids import BOUNDS, HITS, Shape, Texture, apply_texture

F32 = NDArray[np.float32]
_FAR = np.float32(1e9)
_KEY = np.array([-0.45, -0.55, 0.85], dtype=np.float32) / np.float32(np.sqrt(0.45**2 + 0.55**2 + 0.85**2))
_FILL = np.array([0.8, -0.3, 0.5], dtype=np.float32) / np.float32(np.sqrt(0.8**2 + 0.3**2 + 0.5**2))


@dataclass(frozen=True)
class Body:
    """One object: `radius` is half its size, `position` is the centre of its foot on or above the ground, `yaw` is in radians.

    `rotation`: a unit quaternion (w, x, y, z) around its centre, instead of the yaw; the foot is then its position
    before rotation.
    """

    shape: Shape
    color: tuple[float, float, float]
    metal: bool
    radius: float
    position: tuple[float, float, float]
    yaw: float = 0.0
    texture: Texture | None = None
    rotation: tuple[float, float, float, float] | None = None
    stretch: tuple[float, float, float] = (1.0, 1.0, 1.0)  # stretch of a cube along its own axes: walls and beams

    @property
    def axes(self) -> F32:
        """Return (3, 3): its own axes in the world, as columns."""
        if self.rotation is not None:
            return Rotation.from_quat(self.rotation, scalar_first=True).as_matrix().astype(np.float32)
        cos, sin = np.cos(np.float32(self.yaw)), np.sin(np.float32(self.yaw))
        return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], dtype=np.float32)

    @property
    def centre(self) -> F32:
        return np.array([self.position[0], self.position[1], self.position[2] + self.radius], dtype=np.float32)

    @property
    def bounding_radius(self) -> float:
        """Return the radius of a sphere around the centre that contains the object."""
        return self.radius * BOUNDS[self.shape] * max(self.stretch)


@dataclass(frozen=True)
class Camera:
    """Camera at `eye` that looks at `target`; `fov` is the vertical angle in degrees."""

    eye: tuple[float, float, float] = (0.0, -9.0, 5.6)
    target: tuple[float, float, float] = (0.0, 0.0, 0.4)
    fov: float = 32.0

    def axes(self) -> tuple[F32, F32, F32]:
        """Return unit vectors right, up, forward."""
        forward = np.subtract(self.target, self.eye).astype(np.float32)
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, np.array([0, 0, 1], dtype=np.float32))
        right /= np.linalg.norm(right)
        return right.astype(np.float32), np.cross(right, forward).astype(np.float32), forward


@dataclass(frozen=True)
class Stage:
    """Ground and sky, in linear light. `fades`: the ground blends into the sky with distance from the camera."""

    ground: tuple[float, float, float] = (0.62, 0.61, 0.60)
    sky: tuple[float, float, float] = (0.80, 0.82, 0.85)
    texture: Texture | None = None
    fades: bool = True


class Frame(NamedTuple):
    """A rendered frame.

    Attributes:
        rgb: (H, W, 3) uint8.
        mask: (H, W) uint8, 0 for the background, i+1 for the visible body i.
        amodal: (n, H, W) bool, the body's silhouette whether hidden or not.
        depth: (H, W) fp32, distance along the ray, inf for the sky.
    """

    rgb: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    amodal: NDArray[np.bool_]
    depth: F32


def render(bodies: list[Body], camera: Camera, size: int, antialias: int = 2, stage: Stage = Stage()) -> Frame:
    """Trace a square frame of `size` pixels with `antialias`^2 rays per pixel. Masks and depth come from the first ray."""
    fine = size * antialias
    directions = rays(camera, fine)
    eye = np.asarray(camera.eye, dtype=np.float32)
    count = len(directions)
    nearest = np.full(count, _FAR, dtype=np.float32)
    owner = np.full(count, -1, dtype=np.int16)
    normals = np.zeros((count, 3), dtype=np.float32)
    silhouettes = np.zeros((len(bodies), count), dtype=bool)
    # A level ray would meet the ground at a distance that overflows.
    down = directions[:, 2] < -1e-6
    nearest[down] = -eye[2] / directions[down, 2]
    normals[down, 2] = 1
    for i, body in enumerate(bodies):
        # Most rays miss most bodies, so check the bounding sphere before the solid.
        near = _candidates(eye[None], directions, body)
        distance, normal = _hit(eye[None], directions[near], body)
        silhouettes[i, near] = distance < _FAR
        # The nearest hit so far wins, whatever the order of bodies.
        closer = distance < nearest[near]
        hit_rays = near[closer]
        nearest[hit_rays], owner[hit_rays], normals[hit_rays] = distance[closer], i, normal[closer]
    color = _shade(bodies, stage, eye, directions, nearest, owner, normals)
    # Average in linear light, because averaging after the gamma curve would make edges too dark.
    rgb = color.reshape(size, antialias, size, antialias, 3).mean(axis=(1, 3))
    first = (slice(None, None, antialias), slice(None, None, antialias))
    depth = np.where(nearest < _FAR, nearest, np.inf).astype(np.float32).reshape(fine, fine)[first]
    return Frame(
        (np.clip(rgb, 0, 1) ** np.float32(1 / 2.2) * 255 + 0.5).astype(np.uint8),
        (owner.reshape(fine, fine)[first] + 1).astype(np.uint8),
        silhouettes.reshape(len(bodies), fine, fine)[(slice(None), *first)],
        depth,
    )


def project(camera: Camera, point: F32) -> tuple[float, float, float]:
    """Return camera coordinates of a world point: right and up in units of half the image, and depth along the axis."""
    right, up, forward = camera.axes()
    offset = point - np.asarray(camera.eye, dtype=np.float32)
    depth = float(offset @ forward)
    half = float(np.tan(np.radians(camera.fov) / 2)) * depth
    return float(offset @ right) / half, float(offset @ up) / half, depth


def rays(camera: Camera, size: int) -> F32:
    """Return (size * size, 3): unit vectors from the eye through the centres of pixels, row by row."""
    right, up, forward = camera.axes()
    half = np.float32(np.tan(np.radians(camera.fov) / 2))
    steps = ((np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1) * half
    directions = forward + steps[None, :, None] * right - steps[:, None, None] * up
    directions = directions.reshape(-1, 3)
    return directions / np.linalg.norm(directions, axis=1, keepdims=True)


def _candidates(origins: F32, directions: F32, body: Body) -> NDArray[np.intp]:
    """Return the indices of rays that pass through the body's bounding sphere."""
    # Rays extend in both directions; hits at a negative distance are excluded later.
    offset = body.centre - origins
    along = (offset * directions).sum(axis=1)
    return np.flatnonzero((offset**2).sum(axis=1) - along**2 < body.bounding_radius**2)


def _hit(origins: F32, directions: F32, body: Body) -> tuple[F32, F32]:
    """Return the first distance in front of each ray's origin (or _FAR) and the outward normal there."""
    turn = body.axes
    wide = np.array(body.stretch, dtype=np.float32)
    o = (origins - body.centre) @ turn / np.float32(body.radius) / wide
    o, d = np.broadcast_to(o, directions.shape).astype(np.float32), directions @ turn / wide
    with np.errstate(divide="ignore", invalid="ignore"):
        t, n = HITS[body.shape](o, d)
    hit = np.isfinite(t) & (t > 1e-3)
    t = np.where(hit, t * np.float32(body.radius), _FAR).astype(np.float32)
    return t, np.where(hit[:, None], n, 0).astype(np.float32) @ turn.T


def _shade(
    bodies: list[Body],
    stage: Stage,
    eye: F32,
    directions: F32,
    nearest: F32,
    owner: NDArray[np.int16],
    normals: F32,
) -> F32:
    heaven = np.array(stage.sky, dtype=np.float32)
    color = np.broadcast_to(heaven, directions.shape).copy()
    solid = np.flatnonzero(nearest < _FAR)
    points: F32 = (eye + nearest[solid, None] * directions[solid]).astype(np.float32)
    n, d = normals[solid], directions[solid]
    base = _base(bodies, stage, points, owner[solid])
    metal = np.array([False, *(b.metal for b in bodies)])[owner[solid] + 1]
    # Start slightly off the surface, so that a body does not shade itself.
    lit = _shadow_mask(bodies, (points + n * np.float32(2e-3)).astype(np.float32))
    key = np.maximum(n @ _KEY, 0) * lit
    fill = np.maximum(n @ _FILL, 0)
    light = np.float32(0.28) + np.float32(0.62) * key + np.float32(0.18) * fill
    mirror = d - 2 * (d * n).sum(axis=1, keepdims=True) * n
    gleam = np.maximum(mirror @ _KEY, 0)
    matte = base * light[:, None] + (np.float32(0.10) * lit * gleam**12)[:, None]
    sky = (
        np.float32(0.5) + np.float32(0.5) * mirror[:, 2:3]
    )  # a metal body reflects a plain room: bright above, dark below
    metallic = (
        base * (np.float32(0.35) * light[:, None] + np.float32(0.75) * sky**2)
        + (np.float32(0.9) * lit * gleam**60)[:, None]
    )
    color[solid] = np.where(metal[:, None], metallic, matte)
    if not stage.fades:
        return color
    # The ground blends into the sky, because a hard horizon would be at another height in every image.
    fade = np.clip((nearest[solid] - 11) / 14, 0, 1)[:, None] * (owner[solid] < 0)[:, None]
    color[solid] = color[solid] * (1 - fade) + heaven * fade
    return color


def _base(bodies: list[Body], stage: Stage, points: F32, owner: NDArray[np.int16]) -> F32:
    """Return colours without light; textures move with their bodies."""
    base = np.array([stage.ground, *(b.color for b in bodies)], dtype=np.float32)[owner + 1]
    if stage.texture is not None:
        there = owner < 0
        base[there] = apply_texture(stage.texture, points[there], base[there])
    for number, body in enumerate(bodies):
        if body.texture is not None:
            there = owner == number
            own = (points[there] - body.centre) @ body.axes / np.float32(body.radius)
            base[there] = apply_texture(body.texture, own.astype(np.float32), base[there])
    return base


def _shadow_mask(bodies: list[Body], points: F32) -> F32:
    lit = np.ones(len(points), dtype=np.float32)
    toward = np.broadcast_to(_KEY, points.shape)
    for body in bodies:
        near = _candidates(points, toward, body)
        # One distant light: its rays are parallel, and anything that they meet casts a shadow.
        distance, _ = _hit(points[near], toward[near], body)
        lit[near[distance < _FAR]] = 0
    return lit
