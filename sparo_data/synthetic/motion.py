"""What moves in a rendered video: where a pixel's point was a frame before, and where it will be. Exact, from the hit of its ray."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..tracer.render import F32, Body, Camera, rays

_FAR = 1e4  # where the sky is taken to be; a camera that turns moves it, too


def visible_points(camera: Camera, depth: F32, antialias: int = 1) -> np.ndarray:
    """(H * W, 3): the points that the first ray of every pixel hits."""
    return np.asarray(camera.eye) + np.minimum(depth, _FAR).reshape(-1, 1).astype(np.float64) * _first_rays(
        camera, len(depth), antialias
    )


def flow(
    points: np.ndarray,
    owner: np.ndarray,
    source: tuple[Sequence[Body], Camera],
    target: tuple[Sequence[Body], Camera],
    antialias: int = 1,
) -> F32:
    """Pixels from where points are seen now to where they are seen then, whether hidden or not: (H, W, 2), rows and columns.

    Args:
        points: (H * W, 3), see `visible_points`.  owner: (H, W), i + 1 where they are of body i, 0 where of nothing that moves.
        source, target: the bodies and the camera of now and of then, the bodies in one order.
    """
    side = len(owner)
    target_points = points.copy()
    for number, (now, then) in enumerate(zip(source[0], target[0], strict=True)):
        own = owner.reshape(-1) == number + 1
        # Turned back into the body's own axes, and out of those that it will have.
        target_points[own] = (points[own] - now.centre) @ now.axes.astype(float) @ then.axes.astype(
            float
        ).T + then.centre
    # By one projection of both: what rounds it rounds both alike.
    displacement = _pixels(target[1], target_points, side) - _pixels(source[1], points, side)
    return displacement.reshape(side, side, 2).astype(np.float32)


def _first_rays(camera: Camera, side: int, antialias: int) -> np.ndarray:
    directions = rays(camera, side * antialias).reshape(side, antialias, side, antialias, 3)
    return directions[:, 0, :, 0].reshape(-1, 3).astype(np.float64)


def _pixels(camera: Camera, points: np.ndarray, side: int) -> np.ndarray:
    """(n, 2): row and column at which points are seen, 0 at the edge of the first pixel."""
    right, up, forward = (axis.astype(np.float64) for axis in camera.axes())
    offset = points - np.asarray(camera.eye)
    # What passes behind the camera has no place in the picture; it is kept in front, far outside.
    half = np.tan(np.radians(camera.fov) / 2) * np.maximum(offset @ forward, 1e-2)
    return np.stack([1 - offset @ up / half, offset @ right / half + 1], axis=-1) / 2 * side
