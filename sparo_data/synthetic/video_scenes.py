"""Videos of thrown solids: MOVi-like episodes, each a pure function of (config, split, index).

After Kubric's MOVi (Greff et al. 2022): solids in CLEVR's words are thrown into a scene towards its middle, and
recorded for two seconds, 12 frames each. `KINDS` lists the properties of each kind. Shapes are CLEVR's three in all of
them, where MOVi-B to E have meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from evals.sets.objects import ATTRIBUTES
from sparo_train.core.rng import generator

from ..episodes import MAX_DEPTH, Video, compute_boxes, quantize
from ..tracer.render import F32, Body, Camera, Stage, rays, render
from ..tracer.solids import Texture
from .object_scenes import RADII, half_height, table_camera, texture
from .physics import Motion, RigidBody, simulate
from .scenes import COLORS

_FAR = 1e4  # assumed distance of the sky, for flows of a turning camera


def visible_points(camera: Camera, depth: F32, antialias: int = 1) -> np.ndarray:
    """Return (H * W, 3): the points that the first ray of every pixel hits."""
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
    """Return (H, W, 2), rows and columns: the displacement of points between two times, whether hidden or not.

    Args:
        points: (H * W, 3), see `visible_points`.
        owner: (H, W), i + 1 for points of body i, 0 for points that do not move.
        source, target: bodies and camera at both times, bodies in the same order.
        antialias: rays per pixel along each side.
    """
    side = len(owner)
    target_points = points.copy()
    for number, (now, then) in enumerate(zip(source[0], target[0], strict=True)):
        own = owner.reshape(-1) == number + 1
        # Into the body's own axes, and out of its later axes.
        target_points[own] = (points[own] - now.centre) @ now.axes.astype(float) @ then.axes.astype(
            float
        ).T + then.centre
    # Project both alike, so that rounding affects both alike.
    displacement = _pixels(target[1], target_points, side) - _pixels(source[1], points, side)
    return displacement.reshape(side, side, 2).astype(np.float32)


def _first_rays(camera: Camera, side: int, antialias: int) -> np.ndarray:
    directions = rays(camera, side * antialias).reshape(side, antialias, side, antialias, 3)
    return directions[:, 0, :, 0].reshape(-1, 3).astype(np.float64)


def _pixels(camera: Camera, points: np.ndarray, side: int) -> np.ndarray:
    """Return (n, 2): row and column of points in the image, 0 at the edge of the first pixel."""
    right, up, forward = (axis.astype(np.float64) for axis in camera.axes())
    offset = points - np.asarray(camera.eye)
    # Points behind the camera have no position in the image; they are placed in front, far outside.
    half = np.tan(np.radians(camera.fov) / 2) * np.maximum(offset @ forward, 1e-2)
    return np.stack([1 - offset @ up / half, offset @ right / half + 1], axis=-1) / 2 * side


Kind = Literal["a", "b", "c", "d", "e"]


class KindSpec(NamedTuple):
    """Properties of a kind.

    Attributes:
        colored: solids and ground of any colour.
        textured: both with patterns.
        crowd: 10 to 20 solids rest, and one to three are thrown.
        moving: the camera moves along a line, and so does its target.
    """

    colored: bool = False
    textured: bool = False
    crowd: bool = False
    moving: bool = False


KINDS: dict[Kind, KindSpec] = {
    "a": KindSpec(),
    "b": KindSpec(colored=True),
    "c": KindSpec(textured=True),
    "d": KindSpec(textured=True, crowd=True),
    "e": KindSpec(textured=True, crowd=True, moving=True),
}


def _triple(numbers: np.ndarray) -> tuple[float, float, float]:
    x, y, z = numbers.tolist()
    return x, y, z


class _Solid(NamedTuple):
    size: str
    material: str
    shape: Any
    color: str
    light: tuple[float, float, float]
    texture: Texture | None
    size_scale: float

    @property
    def radius(self) -> float:
        return self.size_scale * half_height(self.size, self.shape)


def episode(
    kind: Kind,
    seed: int,
    split: str,
    index: int,
    frames: int,
    size: int,
    max_objects: int = 10,
    antialias: int = 1,
    size_scale: float = 1.0,
) -> Video:
    """Render an episode with all planes.

    Args:
        kind, seed, split, index: identify the episode.
        frames: T.
        size: pixels per side.
        max_objects: largest number of solids for kinds without a crowd (the smallest is three if allowed).
        antialias: rays per pixel along each side.
        size_scale: size of solids relative to CLEVR's.
    """
    rng, traits = generator(seed, f"movi {kind} {split}", index), KINDS[kind]
    resting = int(rng.integers(10, 21)) if traits.crowd else 0
    thrown = int(rng.integers(1, 4)) if traits.crowd else int(rng.integers(min(3, max_objects), max_objects + 1))
    solids = [_solid(rng, traits, size_scale) for _ in range(resting + thrown)]
    # Sampled before solids are placed, so that the number of placement tries changes nothing here.
    stage, path = _stage(rng, traits), _path(rng, traits, frames)
    # One frame before the first and one after the last, for the flows to both.
    motion = simulate(_place_bodies(rng, solids, resting), frames + 2, resting)
    shots = [(_bodies(solids, motion, t), path[t]) for t in range(frames + 2)]
    pictures = [render(*shots[t + 1], size, antialias, stage) for t in range(frames)]
    flows = np.zeros((2, frames, size, size, 2), np.float32)
    for t, picture in enumerate(pictures):
        # From depth instead of neighbouring pixels, because a flow belongs to the point itself.
        points = visible_points(path[t + 1], picture.depth, antialias)
        for towards, other in enumerate((t, t + 2)):
            flows[towards, t] = flow(points, picture.mask, shots[t + 1], shots[other], antialias)
    labels = np.stack([picture.mask for picture in pictures])
    inner = Motion(*(table[1:-1] for table in motion))
    return Video(
        f"{index:08d}",
        np.stack([picture.rgb for picture in pictures]),
        labels,
        compute_boxes(labels, len(solids)),
        {
            "dataset": f"movi-like {kind}",
            "objects": _object_metadata(solids, inner, labels, path[1:-1]),
            "camera": _camera_metadata(path[1:-1]),
        },
        quantize(np.stack([np.minimum(picture.depth, MAX_DEPTH) for picture in pictures])),
        quantize(flows[0]),
        quantize(flows[1]),
    )


def _solid(rng: np.random.Generator, traits: KindSpec, size_scale: float) -> _Solid:
    words = {name: options[rng.integers(len(options))] for name, options in ATTRIBUTES.items()}
    light = _triple(rng.uniform(0.03, 0.75, 3)) if traits.colored else COLORS[words["color"]]
    color = "" if traits.colored else words["color"]
    return _Solid(
        words["size"],
        words["material"],
        words["shape"],
        color,
        light,
        texture(rng) if traits.textured else None,
        size_scale,
    )  # type: ignore[arg-type]


def _stage(rng: np.random.Generator, traits: KindSpec) -> Stage:
    if not (traits.colored or traits.textured):
        return Stage()
    ground = _triple(rng.uniform(0.05, 0.7, 3))
    return Stage(ground=ground, texture=texture(rng, (0.3, 1.0)) if traits.textured else None)


def _path(rng: np.random.Generator, traits: KindSpec, frames: int) -> list[Camera]:
    """Return the camera of every frame, with one before the first and one after the last."""
    first = table_camera(rng)
    if not traits.moving:
        return [first] * (frames + 2)
    # At most four units, as in MOVi-E, to a position on the same half of a shell around the middle.
    target = table_camera(rng)
    way = np.subtract(target.eye, first.eye) + rng.uniform(-3, 3, 3) * (1, 1, 0.5)
    way *= min(1.0, 4 / np.linalg.norm(way))
    looked = rng.uniform(-1, 1, (2, 3)) * (1, 1, 0.3)
    shares = np.arange(-1, frames + 1) / max(frames - 1, 1)
    return [
        Camera(
            _triple(np.add(first.eye, s * way)),
            _triple(looked[0] + s * (looked[1] - looked[0])),
            first.fov,
        )
        for s in shares
    ]


def _place_bodies(rng: np.random.Generator, solids: list[_Solid], resting: int) -> list[RigidBody]:
    """Place solids apart from each other and above the ground; thrown ones move roughly towards the middle."""
    bodies: list[RigidBody] = []
    for number, solid in enumerate(solids):
        is_resting, tries, reach = number < resting, 0, 3.5
        # A normalized Gaussian quaternion is a uniform random rotation.
        rotation = rng.normal(size=4)
        rotation /= np.linalg.norm(rotation)
        while True:
            at = rng.uniform((-reach, -reach, 1.0), (reach, reach, 2.0 if is_resting else 4.0))
            if all(np.linalg.norm(at - other.position) > 2 * (solid.radius + other.radius) for other in bodies):
                break
            tries += 1
            reach += 0.05 * (tries % 20 == 0)  # a crowd spreads until it has space
        velocity = np.zeros(3) if is_resting else rng.uniform((-4, -4, 0), (4, 4, 0)) - at * (1, 1, 0)
        bodies.append(
            RigidBody(
                solid.shape,
                solid.radius,
                solid.material,
                _triple(at),
                tuple(rotation.tolist()),
                _triple(velocity),
            )
        )
    return bodies


def _bodies(solids: list[_Solid], motion: Motion, t: int) -> list[Body]:
    bodies = []
    for number, solid in enumerate(solids):
        x, y, z = motion.positions[t, number].tolist()
        rotation = tuple(motion.quaternions[t, number].tolist())
        metal = solid.material == "metal"
        bodies.append(
            Body(solid.shape, solid.light, metal, solid.radius, (x, y, z - solid.radius), 0.0, solid.texture, rotation)
        )
    return bodies


def _object_metadata(
    solids: list[_Solid], motion: Motion, labels: np.ndarray, path: list[Camera]
) -> list[dict[str, Any]]:
    """Return the solids as plain data: words, and tables with a row per frame."""
    objects = []
    for number, solid in enumerate(solids):
        words: dict[str, Any] = {"size": solid.size, "material": solid.material, "shape": solid.shape}
        # The values that the words describe, as in MOVi-C to F, so that a probe can regress them.
        words |= {"color": solid.color} if solid.color else {"color_rgb": solid.light}
        words |= {"rgb": list(solid.light), "scale": solid.size_scale * RADII[solid.size]}
        # Six digits: a JSON of full doubles is twice as long, without a visible difference.
        tables = {name: table[:, number].round(6).tolist() for name, table in motion._asdict().items()}
        # From the rendered masks, so that hidden objects have none.
        visible = (labels == number + 1).sum((1, 2)).tolist()
        objects.append({"id": number + 1, **words, **tables, "visibility": visible})
    return objects


def _camera_metadata(path: list[Camera]) -> dict[str, Any]:
    """Return the camera's pose in every frame; quaternions (w, x, y, z) in the convention of OpenGL and Blender (looking along -z, y up)."""
    turns = []
    for camera in path:
        right, up, forward = camera.axes()
        turns.append(
            Rotation.from_matrix(np.stack([right, up, -forward], axis=1)).as_quat(scalar_first=True).round(6).tolist()
        )
    return {"fov": path[0].fov, "positions": [list(camera.eye) for camera in path], "quaternions": turns}
