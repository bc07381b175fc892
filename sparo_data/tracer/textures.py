"""Patterns in space for textured scenes: what a point of a surface is painted with. Pure functions of the point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Pattern = Literal["checker", "stripes", "dots", "marble", "clouds"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


@dataclass(frozen=True)
class Texture:
    """A second colour (linear light) where `pattern` has it, `scale` repeats per unit of the surface."""

    pattern: Pattern
    color: tuple[float, float, float]
    scale: float = 2.0
    seed: int = 0


def apply_texture(texture: Texture, points: F32, base: F32) -> F32:
    """Colours (n, 3) of points (n, 3) that were `base` (n, 3)."""
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
    """Value noise of two octaves, 0..1."""
    return ((_noise(p, seed) * 2 + _noise(p * 2, seed + 1)) / 3).astype(np.float32)


def _noise(p: F32, seed: int) -> F32:
    corner = np.floor(p).astype(np.int64)
    t = (p - corner).astype(np.float32)
    t = t * t * (3 - 2 * t)
    total = np.zeros(len(p), np.float32)
    for step in np.ndindex(2, 2, 2):
        weight = np.where(np.array(step), t, 1 - t).prod(1)
        total += weight * _hashed(corner + np.array(step), seed)
    return total


def _hashed(corner: NDArray[np.int64], seed: int) -> F32:
    """A number in 0..1 for every corner of the grid, the same on every machine."""
    x, y, z = corner.astype(np.uint64).T
    mixed = x * np.uint64(0x9E3779B97F4A7C15) ^ y * np.uint64(0xC2B2AE3D27D4EB4F) ^ z * np.uint64(0x165667B19E3779F9)
    mixed = (mixed + np.uint64(seed)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * np.uint64(0x94D049BB133111EB)) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


_SHARES = {"checker": _checker, "stripes": _stripes, "dots": _dots, "marble": _marble, "clouds": _clouds}
