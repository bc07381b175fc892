"""Rigid bodies that fall, slide and collide: Bullet's solver (pybullet), with MOVi's masses and frictions (Greff et al. 2022)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.errors import ConfigError

FPS = 12
_STEPS = 20  # of the solver per frame, 240 a second
_FLOOR = {"lateralFriction": 0.3, "restitution": 0.5}
_MATERIALS = {  # density, friction, restitution
    "metal": (2.7, 0.4, 0.3),
    "rubber": (1.1, 0.8, 0.7),
}


class Thrown(NamedTuple):
    """A solid and how it sets out. position: of its centre.  rotation: a unit quaternion (w, x, y, z)."""

    shape: str
    radius: float
    material: str
    position: tuple[float, float, float]
    rotation: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    velocity: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def mass(self) -> float:
        volume = {"sphere": 4 / 3 * np.pi, "cube": 8.0, "cylinder": 2 * np.pi}[self.shape]
        return float(_MATERIALS[self.material][0] * volume * self.radius**3)


class Motion(NamedTuple):
    """Of n bodies over T frames: positions of centres (T, n, 3), quaternions (w, x, y, z) (T, n, 4), velocities and angular ones (T, n, 3)."""

    positions: np.ndarray
    quaternions: np.ndarray
    velocities: np.ndarray
    angular_velocities: np.ndarray


def simulate(bodies: Sequence[Thrown], frames: int, resting: int = 0) -> Motion:
    """Let them go over a floor at z = 0, and look 12 times a second.

    Args:
        resting: so many of the first bodies lie already where they come to rest when the others set out.

    Raises:
        ConfigError: pybullet is not installed.
    """
    bullet = _bullet()
    client = bullet.connect(bullet.DIRECT)
    try:
        bullet.setGravity(0, 0, -9.81, physicsClientId=client)
        # Pairs in an order of their own making, and not of the memory's.
        bullet.setPhysicsEngineParameter(deterministicOverlappingPairs=1, physicsClientId=client)
        floor = bullet.createMultiBody(
            0, bullet.createCollisionShape(bullet.GEOM_PLANE, physicsClientId=client), physicsClientId=client
        )
        bullet.changeDynamics(floor, -1, **_FLOOR, physicsClientId=client)
        placed = [_placed(bullet, client, body) for body in bodies[:resting]]
        for _ in range(4 * FPS * _STEPS if resting else 0):
            bullet.stepSimulation(physicsClientId=client)
        for number in placed:
            bullet.resetBaseVelocity(number, [0, 0, 0], [0, 0, 0], physicsClientId=client)
        placed += [_placed(bullet, client, body) for body in bodies[resting:]]
        rows: list[list[Any]] = []
        for frame in range(frames):
            for _ in range(_STEPS if frame else 0):
                bullet.stepSimulation(physicsClientId=client)
            rows.append([_state(bullet, client, number) for number in placed])
    finally:
        bullet.disconnect(client)
    table = np.asarray(rows, np.float64).reshape(frames, len(bodies), 13)
    return Motion(table[..., :3], table[..., 3:7], table[..., 7:10], table[..., 10:])


def _placed(bullet: Any, client: int, body: Thrown) -> int:
    r = body.radius
    size: dict[str, Any] = {
        "sphere": {"shapeType": bullet.GEOM_SPHERE, "radius": r},
        "cube": {"shapeType": bullet.GEOM_BOX, "halfExtents": [r, r, r]},
        "cylinder": {"shapeType": bullet.GEOM_CYLINDER, "radius": r, "height": 2 * r},
    }[body.shape]
    w, x, y, z = body.rotation
    number = bullet.createMultiBody(
        body.mass,
        bullet.createCollisionShape(**size, physicsClientId=client),
        basePosition=body.position,
        baseOrientation=(x, y, z, w),
        physicsClientId=client,
    )
    _, friction, restitution = _MATERIALS[body.material]
    bullet.changeDynamics(number, -1, lateralFriction=friction, restitution=restitution, physicsClientId=client)
    bullet.resetBaseVelocity(number, body.velocity, physicsClientId=client)
    return number


def _state(bullet: Any, client: int, number: int) -> list[float]:
    position, (x, y, z, w) = bullet.getBasePositionAndOrientation(number, physicsClientId=client)
    velocity, angular = bullet.getBaseVelocity(number, physicsClientId=client)
    return [*position, w, x, y, z, *velocity, *angular]


def _bullet() -> Any:
    try:
        with _silent():
            import pybullet
    except ImportError:
        raise ConfigError(
            "sparo data movi-like: bodies are moved by pybullet, which is not installed; pip install -e '.[movi]' in sparo's checkout"
        ) from None
    return pybullet


@contextmanager
def _silent() -> Iterator[None]:
    """pybullet's library tells its build time as it is loaded, past Python's streams."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
