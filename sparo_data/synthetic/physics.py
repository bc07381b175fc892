"""Rigid bodies that fall, slide and collide: Bullet's solver (pybullet), with MOVi's masses and frictions (Greff et al. 2022)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from sparo_train.core.errors import ConfigError

from ..tracer.render import Body
from ..tracer.solids import MONKEY, RING, TUBE, Shape, icosahedron_corners

FPS = 12
_STEPS = 20  # solver steps per frame, 240 per second
_FLOOR = {"lateralFriction": 0.3, "restitution": 0.5}
_MATERIALS = {  # density, friction, restitution
    "metal": (2.7, 0.4, 0.3),
    "rubber": (1.1, 0.8, 0.7),
}


# For a solid of radius one.
_VOLUMES: dict[Shape, float] = {
    "sphere": 4 / 3 * np.pi, "cube": 8.0, "cylinder": 2 * np.pi, "cone": 2 / 3 * np.pi, "icosahedron": 2.536,
    "torus": 2 * np.pi**2 * RING * TUBE**2, "monkey": 4 / 3 * np.pi * sum(radius**3 for _, radius in MONKEY),
}  # fmt: skip


class RigidBody(NamedTuple):
    """A solid and its initial state.

    Attributes:
        position: of its centre.
        rotation: unit quaternion (w, x, y, z).
        upright: it only rotates about z.
    """

    shape: Shape
    radius: float
    material: str
    position: tuple[float, float, float]
    rotation: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    velocity: tuple[float, float, float] = (0.0, 0.0, 0.0)
    upright: bool = False

    @property
    def mass(self) -> float:
        return float(_MATERIALS[self.material][0] * _VOLUMES[self.shape] * self.radius**3)


class Motion(NamedTuple):
    """Motion of n bodies over T frames: centres (T, n, 3), quaternions (w, x, y, z) (T, n, 4), velocities and angular velocities (T, n, 3)."""

    positions: np.ndarray
    quaternions: np.ndarray
    velocities: np.ndarray
    angular_velocities: np.ndarray


def simulate(bodies: Sequence[RigidBody], frames: int, resting: int = 0, fixed: Sequence[Body] = ()) -> Motion:
    """Simulate bodies over a floor at z = 0, and record 12 frames per second.

    Args:
        bodies: bodies with their initial state.
        frames: T.
        resting: number of first bodies that come to rest before the others start.
        fixed: bodies that do not move.

    Raises:
        ConfigError: pybullet is not installed.
    """
    bullet = _bullet()
    client = bullet.connect(bullet.DIRECT)
    try:
        bullet.setGravity(0, 0, -9.81, physicsClientId=client)
        # Process pairs in a deterministic order instead of that of memory addresses.
        bullet.setPhysicsEngineParameter(deterministicOverlappingPairs=1, physicsClientId=client)
        floor = bullet.createMultiBody(
            0, bullet.createCollisionShape(bullet.GEOM_PLANE, physicsClientId=client), physicsClientId=client
        )
        bullet.changeDynamics(floor, -1, **_FLOOR, physicsClientId=client)
        for body in fixed:
            _add_fixed_body(bullet, client, body)
        body_ids = [_add_body(bullet, client, body) for body in bodies[:resting]]
        for _ in range(4 * FPS * _STEPS if resting else 0):
            bullet.stepSimulation(physicsClientId=client)
        # Freeze them, because remaining jitter would push the crowd apart while the others fly.
        for number in body_ids:
            bullet.resetBaseVelocity(number, [0, 0, 0], [0, 0, 0], physicsClientId=client)
        body_ids += [_add_body(bullet, client, body) for body in bodies[resting:]]
        rows: list[list[Any]] = []
        for frame in range(frames):
            # The first frame is the initial state.
            for _ in range(_STEPS if frame else 0):
                bullet.stepSimulation(physicsClientId=client)
            rows.append([_state(bullet, client, number) for number in body_ids])
    finally:
        bullet.disconnect(client)
    table = np.asarray(rows, np.float64).reshape(frames, len(bodies), 13)
    return Motion(table[..., :3], table[..., 3:7], table[..., 7:10], table[..., 10:])


def _add_body(bullet: Any, client: int, body: RigidBody) -> int:
    w, x, y, z = body.rotation
    number = bullet.createMultiBody(
        body.mass,
        _collision(bullet, client, body.shape, body.radius),
        # Bullet has w last.
        basePosition=body.position,
        baseOrientation=(x, y, z, w),
        physicsClientId=client,
    )
    # By material, as in MOVi: metal slides, rubber sticks and bounces.
    _, friction, restitution = _MATERIALS[body.material]
    bullet.changeDynamics(number, -1, lateralFriction=friction, restitution=restitution, physicsClientId=client)
    if body.upright:  # an inertia of 0 means infinite inertia
        turning = (0.0, 0.0, body.mass * body.radius**2 / 2)
        bullet.changeDynamics(number, -1, localInertiaDiagonal=turning, physicsClientId=client)
    bullet.resetBaseVelocity(number, body.velocity, physicsClientId=client)
    return number


def _add_fixed_body(bullet: Any, client: int, body: Body) -> None:
    """Add a body that does not move: it has no mass."""
    x, y, z, w = Rotation.from_matrix(body.axes).as_quat().tolist()
    number = bullet.createMultiBody(
        0,
        _collision(bullet, client, body.shape, body.radius, body.stretch),
        basePosition=body.centre.tolist(),
        baseOrientation=(x, y, z, w),
        physicsClientId=client,
    )
    bullet.changeDynamics(number, -1, **_FLOOR, physicsClientId=client)


def _collision(
    bullet: Any, client: int, shape: Shape, r: float, stretch: tuple[float, float, float] = (1, 1, 1)
) -> int:
    """Return Bullet's own shape if it has one, otherwise a convex hull, so that nothing passes through a torus."""
    if shape == "monkey":
        return bullet.createCollisionShapeArray(
            shapeTypes=[bullet.GEOM_SPHERE] * len(MONKEY),
            radii=[r * radius for _, radius in MONKEY],
            collisionFramePositions=[[r * c for c in centre] for centre, _ in MONKEY],
            physicsClientId=client,
        )
    size: dict[str, Any]
    if shape == "sphere":
        size = {"shapeType": bullet.GEOM_SPHERE, "radius": r}
    elif shape == "cube":
        size = {"shapeType": bullet.GEOM_BOX, "halfExtents": [r * s for s in stretch]}
    elif shape == "cylinder":
        size = {"shapeType": bullet.GEOM_CYLINDER, "radius": r, "height": 2 * r}
    else:
        size = {"shapeType": bullet.GEOM_MESH, "vertices": (r * _corners(shape)).tolist()}
    return bullet.createCollisionShape(**size, physicsClientId=client)


def _corners(shape: Shape) -> np.ndarray:
    """Return (n, 3) corners of a hull."""
    if shape == "icosahedron":
        return icosahedron_corners()
    turn = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    around = np.stack([np.cos(turn), np.sin(turn), np.zeros_like(turn)], axis=1)
    if shape == "cone":
        return np.concatenate([[[0, 0, 1.0]], around - [0, 0, 1]])
    # Points of a torus: its outermost circle, and its highest and lowest circle. Their hull approximates it, without the hole.
    wide, flat, up = around * (RING + TUBE), around * RING, np.array([0.0, 0.0, TUBE])
    return np.concatenate([wide, flat + up, flat - up])


def _state(bullet: Any, client: int, number: int) -> list[float]:
    position, (x, y, z, w) = bullet.getBasePositionAndOrientation(number, physicsClientId=client)
    velocity, angular = bullet.getBaseVelocity(number, physicsClientId=client)
    return [*position, w, x, y, z, *velocity, *angular]


def _bullet() -> Any:
    try:
        with _suppress_output():
            import pybullet
    except ImportError:
        raise ConfigError(
            "sparo data movi-like, scenes3d: pybullet is not installed. pip install -e '.[movi]' in sparo's checkout."
        ) from None
    return pybullet


@contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress pybullet's build time, which its library prints on import, bypassing Python's streams."""
    sys.stdout.flush()
    # Redirect the file descriptors, because a C library does not use `sys.stdout`.
    saved_fds = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for number, copy in zip((1, 2), saved_fds, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
