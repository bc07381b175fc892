"""Dynamic scenes that several posed cameras see, each a pure function of (kind, seed, split, index).

After the two data sets of Singh et al. (2024, Appendix C), which were never released. `simple`: two to four solids are thrown over a plain,
five cameras on a hemisphere look at the middle. `nature_ego`: three to five in one of four rooms, whose walls, ground and statue are the same
in every episode, and six cameras on an observer that is thrown, too. The paper has Blender's monkey, and an elephant, a tree, a cat and a
face in its rooms; ours has a head of four spheres, and a tree, an arch, a snowman and a tower of our own solids.
"""

from __future__ import annotations

import colorsys
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from sparo_train.core.rng import generator
from sparo_train.data.video.cameras import look_at

from ..tracer.cycles import Cycles
from ..tracer.render import Body, Camera, Frame, Stage, render
from ..tracer.solids import Shape, Texture
from .physics import Motion, RigidBody, simulate

HALF = 4.5  # half a room's side
_HIGH, _THICK = 1.4, 0.1  # half a wall's height and thickness
ROOMS = ("tree", "arch", "snowman", "tower")  # at (-, -), (+, -), (-, +), (+, +)
STAGE = Stage(
    ground=(0.35, 0.30, 0.22),
    sky=(0.45, 0.62, 0.85),
    texture=Texture("clouds", (0.22, 0.33, 0.12), 0.5, 7),
    fades=False,
)
_WOOD, _LEAF, _STONE, _SNOW, _BRICK = (
    (0.25, 0.13, 0.05),
    (0.06, 0.25, 0.05),
    (0.4, 0.38, 0.36),
    (0.8, 0.82, 0.85),
    (0.45, 0.14, 0.08),
)


@cache
def fixed_bodies() -> tuple[Body, ...]:
    """All that does not move."""
    return (*_walls(), *_tree(), *_arch(), *_snowman(), *_tower())


def _wall(x: float, y: float, along: str, color: tuple[float, float, float], texture: Texture | None) -> Body:
    wide = (HALF + _THICK, _THICK, _HIGH) if along == "x" else (_THICK, HALF + _THICK, _HIGH)
    # A body's foot is a radius below its middle, whatever it is stretched to.
    return Body("cube", color, False, 1.0, (x, y, _HIGH - 1), texture=texture, stretch=wide)


def _walls() -> list[Body]:
    side, step = 2 * (HALF + _THICK), HALF + _THICK
    bricks = Texture("checker", (0.5, 0.24, 0.16), 3.0)
    walls = []
    for at in (-step, step):
        outer = [(at, -side, "x"), (at, side, "x"), (-side, at, "y"), (side, at, "y")]
        walls += [_wall(x, y, along, _BRICK, bricks) for x, y, along in outer]
        # Within, two walls of their own colours: an observer that turns knows where it is.
        walls += [_wall(at, 0.0, "x", (0.55, 0.5, 0.4), None), _wall(0.0, at, "y", (0.35, 0.45, 0.5), None)]
    return walls


def _at(room: int, dx: float, dy: float) -> tuple[float, float]:
    x, y = ((-1, -1), (1, -1), (-1, 1), (1, 1))[room]
    return x * (HALF + _THICK) + dx, y * (HALF + _THICK) + dy


def _tree() -> list[Body]:
    x, y = _at(0, 0, 0)
    return [
        Body("cylinder", _WOOD, False, 0.3, (x, y, 0.0)),
        Body("cone", _LEAF, False, 0.9, (x, y, 0.5)),
        Body("cone", _LEAF, False, 0.65, (x, y, 1.5)),
    ]


def _arch() -> list[Body]:
    sides = [Body("cube", _STONE, False, 0.3, (*_at(1, side, 0.0), 0.45), stretch=(1, 1, 2.5)) for side in (-0.8, 0.8)]
    return [*sides, Body("cube", _STONE, False, 0.3, (*_at(1, 0.0, 0.0), 1.5), stretch=(3.7, 1, 1))]


def _snowman() -> list[Body]:
    x, y = _at(2, 0, 0)
    return [
        Body("sphere", _SNOW, False, 0.8, (x, y, 0.0)),
        Body("sphere", _SNOW, False, 0.55, (x, y, 1.3)),
        Body("monkey", _SNOW, False, 0.4, (x, y, 2.2)),
    ]


def _tower() -> list[Body]:
    x, y = _at(3, 0, 0)
    return [
        Body("cube", (0.1, 0.2, 0.45), False, 0.6, (x, y, 0.0), 0.3),
        Body("cube", (0.5, 0.4, 0.05), False, 0.42, (x, y, 1.2), 0.9),
        Body("torus", (0.5, 0.1, 0.3), True, 0.5, (x, y, 1.69)),
        Body("icosahedron", (0.1, 0.4, 0.35), True, 0.4, (x, y, 2.1)),
    ]


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
_EGO = (0.5, 1.0)  # the observer's radius, and how high its cameras are
_MOUNTED = (
    60.0,
    0.0,
    -60.0,
    120.0,
    180.0,
    -120.0,
)  # degrees from ahead: Front_Left, Front, Front_Right, Back_Left, Back, Back_Right


class Traits(NamedTuple):
    """shapes; objects: least and most; frames of an episode; cameras; fov in degrees."""

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
    """frames: by camera, then time.  poses: (V, T, 4, 4), camera to world, OpenGL's.  metadata: for the json."""

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
        # The circle around its foot has this size, as CLEVR has it.
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
    """An episode, rendered by all of its cameras.

    Args:
        size: pixels per side.  frames: T; None: the kind's.  max_objects: objects; None: the kind's.  cycles: what draws colours; None: our tracer.
    """
    # Of what names the episode alone, so that shards may be made in any order and by any number of processes.
    rng, traits = generator(seed, f"scenes3d {kind} {split}", index), KINDS[kind]
    times, top = frames or traits.frames, max_objects or traits.objects[1]
    solids = [_solid(rng, traits) for _ in range(int(rng.integers(min(traits.objects[0], top), top + 1)))]
    room = int(rng.integers(len(ROOMS))) if kind == "nature_ego" else None
    fixed = [] if room is None else fixed_bodies()
    bodies = _sample_bodies(rng, solids, room)
    ego = [] if room is None else [_observer(rng, room, bodies)]
    # With the observer, who pushes and is pushed.
    motion = simulate([*bodies, *ego], times, fixed=fixed)
    poses = _hemisphere(rng, traits.cameras, times) if room is None else _mounted(motion, ego[0])
    stage = Stage(fades=False) if room is None else STAGE
    shots = [[*_bodies(solids, motion, t), *fixed] for t in range(times)]
    pictures = [
        [
            _drop_fixed_bodies(render(shots[t], _camera(pose, traits.fov), size, antialias, stage), len(solids))
            for t, pose in enumerate(row)
        ]
        for row in poses
    ]
    # Colours alone: masks, depth and what is visible stay ours, exact to the pixel.
    if cycles is not None:
        colours = cycles.pictures(shots, poses, traits.fov, size, stage)
        pictures = [
            [f._replace(rgb=rgb) for f, rgb in zip(*rows, strict=True)] for rows in zip(pictures, colours, strict=True)
        ]
    # Without the observer, which no camera sees and no object is.
    own = Motion(*(table[:, : len(solids)] for table in motion))
    # The sky is infinitely far; a decoder has one of its own for it.
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
    """Apart from each other, and on their way: across the plain towards its middle, or anywhere in a room."""
    bodies: list[RigidBody] = []
    middle, reach, low = (np.zeros(2), 3.0, 0.0) if room is None else (_middle(room), HALF - 1.2, 1.6)
    for solid in solids:
        tries = 0
        while True:
            at = rng.uniform(-reach, reach, 2)
            place = (middle[0] + at[0], middle[1] + at[1], solid.radius * 1.45 + rng.uniform(0, 0.5))
            if (
                _has_clearance(place, solid.radius, bodies, tries) and np.hypot(*at) > low
            ):  # a room's middle is its statue's
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
    """Whether there is room between a place and others; behind a thousand tries less and less is asked for, as a crowd may not fit."""
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
    """(V, T, 4, 4): cameras that stand anywhere between 35 and 70 degrees above the plain, and look at its middle."""
    rows = []
    for _ in range(count):
        around = rng.uniform(0, 2 * np.pi)
        # Evenly over the sphere's surface, and not over angles, which would crowd cameras at the top.
        above = np.arcsin(rng.uniform(np.sin(np.radians(35)), np.sin(np.radians(70))))
        eye = 10 * np.array([np.cos(around) * np.cos(above), np.sin(around) * np.cos(above), np.sin(above)])
        rows.append(np.broadcast_to(look_at(eye, (0.0, 0.0, 0.3)), (times, 4, 4)))
    return np.stack(rows)


def _mounted(motion: Motion, ego: RigidBody) -> np.ndarray:
    """(V, T, 4, 4): cameras on the observer, which is the last body; it turns about z alone."""
    place, turn = motion.positions[:, -1], motion.quaternions[:, -1]
    # It is upright: of its quaternion there are only the cosine and the sine of half the angle, w and z.
    ahead = 2 * np.arctan2(turn[:, 3], turn[:, 0])
    rows = []
    for degrees in _MOUNTED:
        to = ahead + np.radians(degrees)
        eyes = place + np.stack(
            [ego.radius * np.cos(to), ego.radius * np.sin(to), np.full_like(to, _EGO[1] - ego.radius)], 1
        )
        # A little downwards: a level camera would see the wall's top and no floor.
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
    """Without what does not move among its objects."""
    return frame._replace(
        mask=np.where(frame.mask > count, 0, frame.mask).astype(np.uint8), amodal=frame.amodal[:count]
    )


def _object_metadata(solids: list[_Solid], motion: Motion, pictures: list[list[Frame]]) -> list[dict[str, Any]]:
    """The solids as plain data: words, tables with a row per time, and pixels by camera and time."""
    objects = []
    for number, solid in enumerate(solids):
        tables = {name: table[:, number].round(6).tolist() for name, table in motion._asdict().items()}
        visible = [[int((f.mask == number + 1).sum()) for f in row] for row in pictures]
        # As words, and as the numbers behind them, which a probe can regress.
        attributes = {"scale": RADII[solid.size], "rgb": list(COLORS[solid.color])}
        objects.append({"id": number + 1, **solid._asdict(), **attributes, **tables, "visibility": visible})
    return objects
