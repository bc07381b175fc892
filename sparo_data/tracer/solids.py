"""Solids of the ray tracer: ray intersections, and patterns on their surfaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Pattern = Literal["checker", "stripes", "dots", "marble", "clouds"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


@dataclass(frozen=True)
class Texture:
    """A second colour (linear light) where `pattern` applies, with `scale` repetitions per unit of the surface."""

    pattern: Pattern
    color: tuple[float, float, float]
    scale: float = 2.0
    seed: int = 0


def apply_texture(texture: Texture, points: F32, base: F32) -> F32:
    """Return colours (n, 3) of points (n, 3) with base colours `base` (n, 3)."""
    share = _SHARES[texture.pattern](points * np.float32(texture.scale), texture.seed)[:, None].astype(np.float32)
    return (base * (1 - share) + np.array(texture.color, np.float32) * share).astype(np.float32)


def _checker(p: F32, seed: int) -> F32:
    return (np.floor(p + np.float32(1e-3)).astype(np.int64).sum(1) % 2).astype(np.float32)


def _stripes(p: F32, seed: int) -> F32:
    axis = np.random.default_rng(seed).normal(size=3).astype(np.float32)
    return (np.sin(p @ (axis / np.linalg.norm(axis)) * np.float32(2 * np.pi)) > 0).astype(np.float32)


def _dots(p: F32, seed: int) -> F32:
    inside = p - np.floor(p) - np.float32(0.5)
    return ((inside**2).sum(1) < 0.2).astype(np.float32)


def _marble(p: F32, seed: int) -> F32:
    return np.abs(np.sin(p[:, 0] * 2 + 5 * _clouds(p * np.float32(0.7), seed)))


def _clouds(p: F32, seed: int) -> F32:
    """Return value noise of two octaves, 0..1."""
    return ((_noise(p, seed) * 2 + _noise(p * 2, seed + 1)) / 3).astype(np.float32)


def _noise(p: F32, seed: int) -> F32:
    corner = np.floor(p).astype(np.int64)
    t = (p - corner).astype(np.float32)
    t = t * t * (3 - 2 * t)
    total = np.zeros(len(p), np.float32)
    for step in np.ndindex(2, 2, 2):
        weight = np.where(np.array(step), t, 1 - t).prod(1)
        total += weight * _hash_corners(corner + np.array(step), seed)
    return total


def _hash_corners(corner: NDArray[np.int64], seed: int) -> F32:
    """Return a number in 0..1 for every corner of the grid, equal on every machine."""
    x, y, z = corner.astype(np.uint64).T
    mixed = x * np.uint64(0x9E3779B97F4A7C15) ^ y * np.uint64(0xC2B2AE3D27D4EB4F) ^ z * np.uint64(0x165667B19E3779F9)
    mixed = (mixed + np.uint64(seed)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * np.uint64(0x94D049BB133111EB)) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


_SHARES = {"checker": _checker, "stripes": _stripes, "dots": _dots, "marble": _marble, "clouds": _clouds}


F32 = NDArray[np.float32]
Shape = Literal["sphere", "cube", "cylinder", "cone", "icosahedron", "torus", "monkey"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

RING, TUBE = 0.7, 0.3  # radii of the torus: its centre line, and its tube
# A head, its muzzle and two ears: centre and radius. Blender's monkey is a mesh; this one consists of four spheres.
MONKEY = (((0.0, 0.0, -0.1), 0.8), ((0.0, -0.62, -0.3), 0.42), ((0.8, 0.0, 0.35), 0.36), ((-0.8, 0.0, 0.35), 0.36))
# Radius of a sphere around the origin that contains each solid.
BOUNDS: dict[Shape, float] = {
    "sphere": 1.0, "cube": 3**0.5, "cylinder": 2**0.5, "cone": 2**0.5, "icosahedron": 1.0, "torus": RING + TUBE, "monkey": 1.3
}  # fmt: skip
_STEPS, _NEAR = 64, 2e-4  # steps of marching towards a torus, and the tolerance of a hit
_GOLDEN = (1 + 5**0.5) / 2


def icosahedron_corners() -> NDArray[np.float64]:
    """Return (12, 3) corners, at distance one."""
    pairs = [np.roll((0.0, a, b * _GOLDEN), turn) for turn in range(3) for a, b in product((-1, 1), (-1, 1))]
    corners = np.array(pairs)
    return corners / np.linalg.norm(corners[0])


def icosahedron_faces() -> list[tuple[int, int, int]]:
    """Return its 20 faces: three neighbouring corners each."""
    corners = icosahedron_corners()
    near = corners @ corners.T > 0.4
    return [(i, j, k) for i, j, k in combinations(range(12), 3) if near[i, j] and near[j, k] and near[i, k]]


def _normals() -> F32:
    """Return (20, 3) unit normals of its faces, in the direction of the sum of their corners."""
    sums = icosahedron_corners()[np.array(icosahedron_faces())].sum(1)
    return (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)


_NORMALS = _normals()
_INSIDE = np.float32((icosahedron_corners() @ _NORMALS[0].astype(float)).max())  # distance of a face


# `o` is in units of the radius and `d` a unit vector (stretched for a cube), so distances are in units of the radius.
def sphere(o: F32, d: F32) -> tuple[F32, F32]:
    """Return distances and points where rays (n, 3) meet the unit sphere; infinity for a miss."""
    b, c = (o * d).sum(axis=1), (o * o).sum(axis=1) - 1
    disc = b * b - c
    t = np.where(disc > 0, -b - np.sqrt(np.maximum(disc, 0)), np.inf)
    return t, o + t[:, None] * d


def cube(o: F32, d: F32) -> tuple[F32, F32]:
    """Return distances and points where rays (n, 3) meet the cube of side 2."""
    side = np.where(
        d < 0, np.float32(-1), np.float32(1)
    )  # a ray parallel to a face may pass between both of its planes
    near, far = (-side - o) / d, (side - o) / d
    enter, leave = near.max(axis=1), far.min(axis=1)
    t = np.where(enter < leave, enter, np.inf)
    axis = near.argmax(axis=1)
    n = np.zeros_like(d)
    rows = np.arange(len(d))
    n[rows, axis] = -np.sign(d[rows, axis])
    return t, n


def cylinder(o: F32, d: F32) -> tuple[F32, F32]:
    """Return distances and points where rays (n, 3) meet the cylinder of radius 1 and height 2 around z."""
    a = d[:, 0] ** 2 + d[:, 1] ** 2
    b = o[:, 0] * d[:, 0] + o[:, 1] * d[:, 1]
    c = o[:, 0] ** 2 + o[:, 1] ** 2 - 1
    disc = b * b - a * c
    side = np.where(disc > 0, (-b - np.sqrt(np.maximum(disc, 0))) / a, np.inf)
    side = np.where(np.abs(o[:, 2] + side * d[:, 2]) <= 1, side, np.inf)
    cap = (-np.sign(d[:, 2]) - o[:, 2]) / d[:, 2]
    x, y = o[:, 0] + cap * d[:, 0], o[:, 1] + cap * d[:, 1]
    cap = np.where(x * x + y * y <= 1, cap, np.inf)
    t = np.minimum(side, cap)
    point = o + t[:, None] * d
    n = np.stack([point[:, 0], point[:, 1], np.zeros_like(t)], axis=1)
    flat = cap < side
    n[flat] = np.stack([np.zeros(flat.sum()), np.zeros(flat.sum()), -np.sign(d[flat, 2])], axis=1)
    return t, n


def cone(o: F32, d: F32) -> tuple[F32, F32]:
    """Intersect a cone with its tip at z = 1 and its base of radius 1 at z = -1."""
    k = np.float32(0.25)
    h = 1 - o[:, 2]
    a = d[:, 0] ** 2 + d[:, 1] ** 2 - k * d[:, 2] ** 2
    b = o[:, 0] * d[:, 0] + o[:, 1] * d[:, 1] + k * h * d[:, 2]
    c = o[:, 0] ** 2 + o[:, 1] ** 2 - k * h**2
    root = np.sqrt(np.maximum(b * b - a * c, 0))
    best = np.full(len(o), np.inf, dtype=np.float32)
    for sign in (-1, 1):
        t = (-b + sign * root) / a
        there = (b * b - a * c > 0) & (np.abs(o[:, 2] + t * d[:, 2]) <= 1) & (t > 1e-4)
        best = np.where(there & (t < best), t, best)
    foot = (-1 - o[:, 2]) / d[:, 2]
    x, y = o[:, 0] + foot * d[:, 0], o[:, 1] + foot * d[:, 1]
    on_foot = (x * x + y * y <= 1) & (foot > 1e-4) & (foot < best)
    t = np.where(on_foot, foot, best)
    point = o + np.where(np.isfinite(t), t, 0)[:, None] * d
    n = np.stack([point[:, 0], point[:, 1], k * (1 - point[:, 2])], axis=1)
    n /= np.maximum(np.linalg.norm(n, axis=1, keepdims=True), 1e-9)
    n[on_foot] = (0, 0, -1)
    return t, n


def icosahedron(o: F32, d: F32) -> tuple[F32, F32]:
    """Return distances and points where rays (n, 3) meet the icosahedron."""
    along, left = d @ _NORMALS.T, _INSIDE - o @ _NORMALS.T
    t = left / along
    entering = np.where(along < 0, t, -np.inf)
    enter, leave = entering.max(axis=1), np.where(along > 0, t, np.inf).min(axis=1)
    # A ray parallel to a face and outside of it never enters.
    outside = ((along == 0) & (left < 0)).any(axis=1)
    return np.where((enter < leave) & ~outside, enter, np.inf), _NORMALS[entering.argmax(axis=1)].copy()


def torus(o: F32, d: F32) -> tuple[F32, F32]:
    """Intersect a torus around z by sphere marching, which is as exact as its last step."""

    def signed_distance(p: F32) -> F32:
        return np.hypot(np.hypot(p[:, 0], p[:, 1]) - np.float32(RING), p[:, 2]) - np.float32(TUBE)

    b = (o * d).sum(axis=1)
    disc = b * b - (o * o).sum(axis=1) + np.float32(1.0)
    t = np.maximum(-b - np.sqrt(np.maximum(disc, 0)), 1e-3).astype(np.float32)
    for _ in range(_STEPS):
        t = np.minimum(t + signed_distance(o + t[:, None] * d), 1e3).astype(np.float32)  # rays that miss never converge
    point = o + t[:, None] * d
    t = np.where((np.abs(signed_distance(point)) < _NEAR) & (disc > 0), t, np.inf)
    ring = point[:, :2] * (np.float32(RING) / np.maximum(np.hypot(point[:, 0], point[:, 1]), 1e-9))[:, None]
    n = np.stack([point[:, 0] - ring[:, 0], point[:, 1] - ring[:, 1], point[:, 2]], axis=1)
    return t, n / np.maximum(np.linalg.norm(n, axis=1, keepdims=True), 1e-9)


def monkey(o: F32, d: F32) -> tuple[F32, F32]:
    """Intersect the nearest of its spheres."""
    best, n = np.full(len(o), np.inf, dtype=np.float32), np.zeros_like(d)
    for centre, radius in MONKEY:
        off = (o - np.array(centre, dtype=np.float32)) / np.float32(radius)
        t, own = sphere(off, d)
        t = t * np.float32(radius)
        closer = (t > 1e-4) & (t < best)
        best, n = np.where(closer, t, best), np.where(closer[:, None], own, n)
    return best, n


HITS: dict[Shape, Callable[[F32, F32], tuple[F32, F32]]] = {
    "sphere": sphere,
    "cube": cube,
    "cylinder": cylinder,
    "cone": cone,
    "icosahedron": icosahedron,
    "torus": torus,
    "monkey": monkey,
}
