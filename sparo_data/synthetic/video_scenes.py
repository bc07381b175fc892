"""Videos of solids that are thrown: MOVi-like episodes, each a pure function of (config, split, index).

After Kubric's MOVi (Greff et al. 2022): solids in CLEVR's words fall into a scene from around its middle, towards it, and are seen for
two seconds, 12 frames each. What each kind has is in `KINDS`; shapes are CLEVR's three in all of them, where MOVi-B to E have meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from evals.sets.objects import ATTRIBUTES
from sparo_train.core.rng import generator

from ..episodes import MAX_DEPTH, Video, boxes_of, quantize
from ..tracer.render import F32, Body, Camera, Stage, rays, render
from ..tracer.solids import Texture
from .object_scenes import RADII, radius_of, table_camera, texture
from .physics import Motion, RigidBody, simulate
from .scenes import COLORS

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


Kind = Literal["a", "b", "c", "d", "e"]


class KindSpec(NamedTuple):
    """colored: solids and ground of any colour.  textured: both with patterns.  crowd: 10 to 20 lie there, and one to three are thrown.
    moving: the camera moves along a line, and so does what it looks at."""

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
        return self.size_scale * radius_of(self.size, self.shape)


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
    """An episode, rendered with all planes.

    Args:
        frames: T.  size: pixels per side.  max_objects: solids of kinds without a crowd, which have three at least where it allows.
        size_scale: solids are so many times as large as CLEVR's.
    """
    rng, traits = generator(seed, f"movi {kind} {split}", index), KINDS[kind]
    resting = int(rng.integers(10, 21)) if traits.crowd else 0
    thrown = int(rng.integers(1, 4)) if traits.crowd else int(rng.integers(min(3, max_objects), max_objects + 1))
    solids = [_solid(rng, traits, size_scale) for _ in range(resting + thrown)]
    # Drawn before the solids are placed: how long those take to find room changes nothing here.
    stage, path = _stage(rng, traits), _path(rng, traits, frames)
    # A frame before the first and one behind the last, for flows from the one and to the other.
    motion = simulate(_place_bodies(rng, solids, resting), frames + 2, resting)
    shots = [(_bodies(solids, motion, t), path[t]) for t in range(frames + 2)]
    pictures = [render(*shots[t + 1], size, antialias, stage) for t in range(frames)]
    flows = np.zeros((2, frames, size, size, 2), np.float32)
    for t, picture in enumerate(pictures):
        # From depth, and not from neighbours: a flow is where the point itself was.
        points = visible_points(path[t + 1], picture.depth, antialias)
        for towards, other in enumerate((t, t + 2)):
            flows[towards, t] = flow(points, picture.mask, shots[t + 1], shots[other], antialias)
    labels = np.stack([picture.mask for picture in pictures])
    inner = Motion(*(table[1:-1] for table in motion))
    return Video(
        f"{index:08d}",
        np.stack([picture.rgb for picture in pictures]),
        labels,
        boxes_of(labels, len(solids)),
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
    """The camera of every frame, of the one before the first and of the one behind the last."""
    first = table_camera(rng)
    if not traits.moving:
        return [first] * (frames + 2)
    # At most four units, as MOVi-E's: towards a place on the same half of a shell around the middle.
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
    """Apart from each other, above the ground; those that are thrown head for the middle, more or less."""
    bodies: list[RigidBody] = []
    for number, solid in enumerate(solids):
        is_resting, tries, reach = number < resting, 0, 3.5
        # A normal quaternion of length one is an even draw of all turns.
        rotation = rng.normal(size=4)
        rotation /= np.linalg.norm(rotation)
        while True:
            at = rng.uniform((-reach, -reach, 1.0), (reach, reach, 2.0 if is_resting else 4.0))
            if all(np.linalg.norm(at - other.position) > 2 * (solid.radius + other.radius) for other in bodies):
                break
            tries += 1
            reach += 0.05 * (tries % 20 == 0)  # a crowd spreads until it has room
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
    """The solids as plain data: words, and tables with a row per frame."""
    objects = []
    for number, solid in enumerate(solids):
        words: dict[str, Any] = {"size": solid.size, "material": solid.material, "shape": solid.shape}
        # The numbers behind the words, as MOVi-C to F's objects have them: a probe can regress them.
        words |= {"color": solid.color} if solid.color else {"color_rgb": solid.light}
        words |= {"rgb": list(solid.light), "scale": solid.size_scale * RADII[solid.size]}
        # Six digits: a JSON of full doubles is twice as long, and no renderer tells them apart.
        tables = {name: table[:, number].round(6).tolist() for name, table in motion._asdict().items()}
        # Of the rendered masks: what is hidden has none, wherever it is.
        visible = (labels == number + 1).sum((1, 2)).tolist()
        objects.append({"id": number + 1, **words, **tables, "visibility": visible})
    return objects


def _camera_metadata(path: list[Camera]) -> dict[str, Any]:
    """Where the camera is in every frame; quaternions (w, x, y, z) as OpenGL's and Blender's cameras have them, which look along -z, y up."""
    turns = []
    for camera in path:
        right, up, forward = camera.axes()
        turns.append(
            Rotation.from_matrix(np.stack([right, up, -forward], axis=1)).as_quat(scalar_first=True).round(6).tolist()
        )
    return {"fov": path[0].fov, "positions": [list(camera.eye) for camera in path], "quaternions": turns}
