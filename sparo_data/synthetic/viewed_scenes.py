"""Dynamic scenes seen by several posed cameras, each a pure function of (kind, seed, split, index).

After the two data sets of Singh et al. (2024, Appendix C), which were not released. `simple`: two to four solids are
thrown over a plain, and five cameras on a hemisphere look at the middle. `nature_ego`: three to five solids in one of
four rooms, whose walls, ground and statue are the same in every episode, and six cameras on an observer that is thrown,
too. The paper has Blender's monkey, and an elephant, a tree, a cat and a face in its rooms. Ours has a head of four
spheres, and a tree, an arch, a snowman and a tower built of our own solids.
"""

from __future__ import annotations

import colorsys
from typing import Any, Literal, NamedTuple

import numpy as np

from sparo_train.core.rng import generator
from sparo_train.data.video.cameras import look_at

from ..tracer.cycles import Cycles
from ..tracer.render import Body, Camera, Frame, Stage, render
from ..tracer.solids import Shape
from .physics import Motion, RigidBody, simulate
from .rooms import HALF, ROOMS, STAGE, fixed_bodies

Kind = Literal["simple", "nature_ego"]
_TONES = {"pale": (0.35, 1.0), "bright": (0.95, 0.95), "dull": (0.5, 0.6), "deep": (0.95, 0.45)}  # saturation and value
_HUES = ("red", "orange", "yellow", "green", "teal", "blue", "purple", "pink")
# The paper's 32 colours have no names; ours are eight hues in four tones, in linear light.
COLORS: dict[str, tuple[float, float, float]] = {
    f"{tone} {hue}": tuple(c**2.2 for c in colorsys.hsv_to_rgb(number / 8, *_TONES[tone]))  # type: ignore[misc]
    for number, hue in enumerate(_HUES)
    for tone in _TONES
}
RADII = {"small": 0.4, "medium": 0.6, "large": 0.8}
_EGO = (0.5, 1.0)  # the observer's radius, and the height of its cameras
_MOUNTED = (
    60.0,
    0.0,
    -60.0,
    120.0,
    180.0,
    -120.0,
)  # degrees from ahead: Front_Left, Front, Front_Right, Back_Left, Back, Back_Right


class Traits(NamedTuple):
    """Properties of a kind: shapes, least and largest number of objects, frames per episode, cameras, and fov in degrees."""

    shapes: tuple[Shape, ...]
    objects: tuple[int, int]
    frames: int
    cameras: int
    fov: float


KINDS: dict[Kind, Traits] = {
    "simple": Traits(("sphere", "cylinder", "cube", "monkey"), (2, 4), 32, 5, 35.0),
    "nature_ego": Traits(("sphere", "cylinder", "cube", "cone", "icosahedron", "torus"), (3, 5), 24, 6, 70.0),
}


class MultiViewEpisode(NamedTuple):
    """An episode with several cameras.

    Attributes:
        frames: by camera, then time.
        poses: (V, T, 4, 4), camera to world, OpenGL's.
        metadata: content of the JSON.
    """

    key: str
    frames: list[list[Frame]]
    poses: np.ndarray
    metadata: dict[str, Any]


class _Solid(NamedTuple):
    shape: Shape
    color: str
    material: str
    size: str

    @property
    def radius(self) -> float:
        # Its circle on the ground has this size, as in CLEVR.
        return RADII[self.size] / (2**0.5 if self.shape == "cube" else 1)


def multi_view_episode(
    kind: Kind,
    seed: int,
    split: str,
    index: int,
    size: int,
    frames: int | None = None,
    antialias: int = 1,
    max_objects: int | None = None,
    cycles: Cycles | None = None,
) -> MultiViewEpisode:
    """Render an episode with all of its cameras.

    Args:
        kind, seed, split, index: identify the episode.
        size: pixels per side.
        frames: T; None: the kind's.
        antialias: rays per pixel along each side.
        max_objects: largest number of objects; None: the kind's.
        cycles: renders the colours; None: our ray tracer.
    """
    # Seed from the episode's identity only, so that shards can be made in any order by any number of processes.
    rng, traits = generator(seed, f"scenes3d {kind} {split}", index), KINDS[kind]
    times, top = frames or traits.frames, max_objects or traits.objects[1]
    solids = [_solid(rng, traits) for _ in range(int(rng.integers(min(traits.objects[0], top), top + 1)))]
    room = int(rng.integers(len(ROOMS))) if kind == "nature_ego" else None
    fixed = [] if room is None else fixed_bodies()
    bodies = _sample_bodies(rng, solids, room)
    ego = [] if room is None else [_observer(rng, room, bodies)]
    # With the observer, which collides with the others.
    motion = simulate([*bodies, *ego], times, fixed=fixed)
    poses = _hemisphere(rng, traits.cameras, times) if room is None else _mounted_cameras(motion, ego[0])
    stage = Stage(fades=False) if room is None else STAGE
    shots = [[*_bodies(solids, motion, t), *fixed] for t in range(times)]
    pictures = [
        [
            _drop_fixed_bodies(render(shots[t], _camera(pose, traits.fov), size, antialias, stage), len(solids))
            for t, pose in enumerate(row)
        ]
        for row in poses
    ]
    # Colours only: masks, depth and visibility stay ours, exact to the pixel.
    if cycles is not None:
        colours = cycles.pictures(shots, poses, traits.fov, size, stage)
        pictures = [
            [f._replace(rgb=rgb) for f, rgb in zip(*rows, strict=True)] for rows in zip(pictures, colours, strict=True)
        ]
    # Without the observer, which no camera sees and which is not an object.
    own = Motion(*(table[:, : len(solids)] for table in motion))
    # The sky is infinitely far; decoders model it separately.
    depths = np.concatenate([f.depth[np.isfinite(f.depth)] for row in pictures for f in row])
    metadata = {
        "dataset": f"scenes3d {kind}",
        "convention": "opengl",
        "near": round(float(depths.min()), 4),
        "far": round(float(depths.max()), 4),
        "cameras": [{"fov": traits.fov, "poses": row.round(6).tolist()} for row in poses],
        "objects": _object_metadata(solids, own, pictures),
        **({} if room is None else {"room": ROOMS[room]}),
    }
    return MultiViewEpisode(f"{index:08d}", pictures, poses, metadata)


def _solid(rng: np.random.Generator, traits: Traits) -> _Solid:
    def one(options: Any) -> Any:
        return list(options)[rng.integers(len(options))]

    return _Solid(one(traits.shapes), one(COLORS), one(("rubber", "metal")), one(RADII))


def _sample_bodies(rng: np.random.Generator, solids: list[_Solid], room: int | None) -> list[RigidBody]:
    """Place bodies apart from each other, moving across the plain towards its middle, or anywhere in a room."""
    bodies: list[RigidBody] = []
    middle, reach, low = (np.zeros(2), 3.0, 0.0) if room is None else (_middle(room), HALF - 1.2, 1.6)
    for solid in solids:
        tries = 0
        while True:
            at = rng.uniform(-reach, reach, 2)
            place = (middle[0] + at[0], middle[1] + at[1], solid.radius * 1.45 + rng.uniform(0, 0.5))
            if (
                _has_clearance(place, solid.radius, bodies, tries) and np.hypot(*at) > low
            ):  # the statue is in the middle of a room
                break
            tries += 1
        if room is None:
            speed = -at * rng.uniform(0.5, 1.2) + rng.uniform(-0.6, 0.6, 2)
        else:
            turn = rng.uniform(0, 2 * np.pi)
            speed = rng.uniform(1.0, 3.0) * np.array([np.cos(turn), np.sin(turn)])
        yaw = rng.uniform(0, 2 * np.pi) / 2
        x, y, z = (float(c) for c in place)
        rotation = (float(np.cos(yaw)), 0.0, 0.0, float(np.sin(yaw)))
        velocity = (float(speed[0]), float(speed[1]), 0.0)
        bodies.append(RigidBody(solid.shape, solid.radius, solid.material, (x, y, z), rotation, velocity))
    return bodies


def _has_clearance(place: tuple[float, float, float], radius: float, others: list[RigidBody], tries: int) -> bool:
    """Return whether a position is clear of others; after a thousand tries the required clearance shrinks, because a crowd may not fit."""
    clearance_factor = 1.5 * 0.98 ** max(0, tries // 100 - 10)
    return all(np.linalg.norm(np.subtract(place, o.position)) > clearance_factor * (radius + o.radius) for o in others)


def _observer(rng: np.random.Generator, room: int, others: list[RigidBody]) -> RigidBody:
    radius, _ = _EGO
    tries = 0
    while True:
        at = rng.uniform(-HALF + 1.2, HALF - 1.2, 2)
        place = (float(_middle(room)[0] + at[0]), float(_middle(room)[1] + at[1]), radius + 0.01)
        if _has_clearance(place, radius, others, tries) and np.hypot(*at) > 1.8:
            break
        tries += 1
    turn, ahead = rng.uniform(0, 2 * np.pi, 2)
    velocity = (float(2 * np.cos(turn)), float(2 * np.sin(turn)), 0.0)
    rotation = (float(np.cos(ahead / 2)), 0.0, 0.0, float(np.sin(ahead / 2)))
    return RigidBody("cylinder", radius, "rubber", place, rotation, velocity, upright=True)


def _middle(room: int) -> np.ndarray:
    return (HALF + 0.1) * np.array([(-1.0, -1.0), (1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)][room])


def _hemisphere(rng: np.random.Generator, count: int, times: int) -> np.ndarray:
    """Return (V, T, 4, 4): cameras anywhere between 35 and 70 degrees above the plain that look at its middle."""
    rows = []
    for _ in range(count):
        around = rng.uniform(0, 2 * np.pi)
        # Uniform over the sphere's surface instead of angles, which would crowd cameras at the top.
        above = np.arcsin(rng.uniform(np.sin(np.radians(35)), np.sin(np.radians(70))))
        eye = 10 * np.array([np.cos(around) * np.cos(above), np.sin(around) * np.cos(above), np.sin(above)])
        rows.append(np.broadcast_to(look_at(eye, (0.0, 0.0, 0.3)), (times, 4, 4)))
    return np.stack(rows)


def _mounted_cameras(motion: Motion, ego: RigidBody) -> np.ndarray:
    """Return (V, T, 4, 4): cameras on the observer, the last body, which rotates about z only."""
    place, turn = motion.positions[:, -1], motion.quaternions[:, -1]
    # It is upright, so its quaternion only has w and z, cosine and sine of half the angle.
    ahead = 2 * np.arctan2(turn[:, 3], turn[:, 0])
    rows = []
    for degrees in _MOUNTED:
        to = ahead + np.radians(degrees)
        eyes = place + np.stack(
            [ego.radius * np.cos(to), ego.radius * np.sin(to), np.full_like(to, _EGO[1] - ego.radius)], 1
        )
        # Slightly downwards, because a level camera would see the wall's top and no floor.
        down = np.stack([np.cos(to), np.sin(to), np.full_like(to, -0.15)], 1)
        rows.append(np.stack([look_at(eye, eye + step) for eye, step in zip(eyes, down, strict=True)]))
    return np.stack(rows)


def _camera(pose: np.ndarray, fov: float) -> Camera:
    eye, target = pose[:3, 3], pose[:3, 3] - pose[:3, 2]
    return Camera(tuple(eye.tolist()), tuple(target.tolist()), fov)


def _bodies(solids: list[_Solid], motion: Motion, t: int) -> list[Body]:
    bodies = []
    for number, solid in enumerate(solids):
        x, y, z = motion.positions[t, number].tolist()
        rotation = tuple(motion.quaternions[t, number].tolist())
        metal = solid.material == "metal"
        bodies.append(
            Body(solid.shape, COLORS[solid.color], metal, solid.radius, (x, y, z - solid.radius), rotation=rotation)
        )
    return bodies


def _drop_fixed_bodies(frame: Frame, count: int) -> Frame:
    """Remove bodies that do not move from its objects."""
    return frame._replace(
        mask=np.where(frame.mask > count, 0, frame.mask).astype(np.uint8), amodal=frame.amodal[:count]
    )


def _object_metadata(solids: list[_Solid], motion: Motion, pictures: list[list[Frame]]) -> list[dict[str, Any]]:
    """Return the solids as plain data: words, tables with a row per time, and pixels by camera and time."""
    objects = []
    for number, solid in enumerate(solids):
        tables = {name: table[:, number].round(6).tolist() for name, table in motion._asdict().items()}
        visible = [[int((f.mask == number + 1).sum()) for f in row] for row in pictures]
        # As words, and as the values behind them, which a probe can regress.
        attributes = {"scale": RADII[solid.size], "rgb": list(COLORS[solid.color])}
        objects.append({"id": number + 1, **solid._asdict(), **attributes, **tables, "visibility": visible})
    return objects
