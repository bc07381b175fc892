"""Scenes for object discovery and set prediction: CLEVR-like, textured, and rooms; each a pure function of (seed, split, index).

`clevr` follows the rules of CLEVR's generator (Johnson et al. 2017): three to ten solids, two sizes, two materials,
eight colours, separated by a margin in space and in every direction, none hidden. `clevrtex` has patterns on solids and
ground (after Karazija et al. 2021). `rooms` are coloured rooms with one to three objects, seen from anywhere inside
(after Burgess et al. 2019), and `ROOM_TESTS` are their tests out of distribution. `rooms_background` are rooms whose
floor, sky and walls have labels, too, for scores that count the background's segments. Attributes have CLEVR's names, so
`task: objects` and set prediction support all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from evals.sets.objects import ATTRIBUTES, REACH
from sparo_train.core.config import Frozen, field
from sparo_train.core.rng import generator

from ..pool import run_jobs
from ..tracer.render import Body, Camera, Frame, Stage, project, render
from ..tracer.solids import PATTERNS, Texture
from ..writer import Fields, encode_image, write_manifest, write_shard, write_wds_layout
from .scenes import COLORS

Kind = Literal["clevr", "clevrtex", "rooms", "rooms_background"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_ROOMS = ("rooms", "rooms_background")
ROOM_TESTS = ("empty_room", "six_objects", "identical_color")

RADII = {"large": 0.7, "small": 0.35}
_MIN_GAP, _MARGIN = 0.25, 0.4  # CLEVR's margins: between surfaces, and along each axis of the camera
_MIN_VISIBLE_SHARE = 200 / (320 * 480)  # share of the image that every object must show
_WALL = 10.0  # half a wall's side: a cube so large that only one of its faces is visible


def half_height(size: str, shape: str) -> float:
    """Return half a solid's height; a cube fits into the sphere's circle on the ground, as in CLEVR."""
    return RADII[size] / (2**0.5 if shape == "cube" else 1)


class Solid(NamedTuple):
    """An object of a scene graph: CLEVR's attributes, the position of its foot, yaw in radians, and `texture` if it is painted."""

    size: str
    material: str
    shape: Any
    color: str
    x: float
    y: float
    yaw: float
    texture: Texture | None = None

    @property
    def radius(self) -> float:
        """Return half its height."""
        return half_height(self.size, self.shape)

    def body(self) -> Body:
        metal = self.material == "metal"
        return Body(self.shape, COLORS[self.color], metal, self.radius, (self.x, self.y, 0.0), self.yaw, self.texture)


class ObjectScene(NamedTuple):
    """Solids on a stage, with camera and light; `walls` are bodies that are not objects."""

    kind: str
    solids: tuple[Solid, ...]
    camera: Camera
    stage: Stage
    walls: tuple[Body, ...] = ()

    def render(self, size: int, antialias: int = 1) -> Frame:
        """Render the scene. Mask value i + 1 is solid i. Ground, sky and walls are 0, or, in rooms_background, the values after the solids, in this order."""
        bodies = [*(s.body() for s in self.solids), *self.walls]
        frame = render(bodies, self.camera, size, antialias, self.stage)
        count = len(self.solids)
        mask = frame.mask.astype(int)
        if self.kind == "rooms_background":
            sky = np.isinf(frame.depth)
            mask = np.select([sky, mask == 0, mask > count], [count + 2, count + 1, mask + 2], mask)
        else:
            mask[mask > count] = 0
        return frame._replace(mask=mask.astype(np.uint8), amodal=frame.amodal[:count])

    def graph(self, frame: Frame) -> dict[str, Any]:
        """Return the scene as plain data: `objects` with CLEVR's words, positions in the world, and pixels in the image."""
        side = frame.mask.shape[0]
        objects = []
        for number, solid in enumerate(self.solids):
            right, up, _ = project(self.camera, solid.body().centre)
            objects.append(
                {
                    "id": number + 1,
                    **{name: getattr(solid, name) for name in ATTRIBUTES},
                    "position": [solid.x, solid.y, solid.radius],
                    "rotation": float(np.degrees(solid.yaw)),
                    "pixel": [(right + 1) / 2 * side, (1 - up) / 2 * side],
                    "visible": int((frame.mask == number + 1).sum()),
                }
            )
        camera = {"eye": self.camera.eye, "target": self.camera.target, "fov": self.camera.fov}
        return {"dataset": self.kind, "objects": objects, "camera": camera}


class RenderedScene(NamedTuple):
    """Scene with its image, masks and depth."""

    scene: ObjectScene
    frame: Frame


def object_scene(
    kind: Kind, seed: int, split: str, index: int, size: int, max_objects: int = 10, antialias: int = 1, test: str = ""
) -> RenderedScene:
    """Render scene `index` of a split.

    Args:
        kind, seed, split, index: identify the scene.
        size: pixels per side.
        max_objects: largest number of objects (the smallest is three if allowed; rooms: one to three).
        antialias: rays per pixel along each side.
        test: one of `ROOM_TESTS`, or empty.
    """
    rng = generator(seed, f"objects {kind} {split} {test}", index)
    # Occlusion is only known after rendering: if an object is hidden, sample the whole scene again, like CLEVR's
    # generator.
    while True:
        scene = _room(rng, kind, test) if kind in _ROOMS else _table(rng, kind, max_objects)
        frame = scene.render(size, antialias)
        visible_pixels = np.bincount(frame.mask.ravel(), minlength=len(scene.solids) + 1)[1 : len(scene.solids) + 1]
        if (visible_pixels >= max(1, _MIN_VISIBLE_SHARE * size * size)).all():
            return RenderedScene(scene, frame)


def _solid(rng: np.random.Generator, painted: bool = False) -> Solid:
    attributes: dict[str, Any] = {name: words[rng.integers(len(words))] for name, words in ATTRIBUTES.items()}
    solid = Solid(**attributes, x=0.0, y=0.0, yaw=float(rng.uniform(0, 2 * np.pi)))
    return solid._replace(texture=texture(rng)) if painted else solid


def texture(rng: np.random.Generator, scale: tuple[float, float] = (1.0, 3.0)) -> Texture:
    """Return a random pattern in a second colour."""
    color = tuple(float(c) for c in rng.uniform(0.02, 0.8, 3))
    return Texture(PATTERNS[rng.integers(len(PATTERNS))], color, float(rng.uniform(*scale)), int(rng.integers(1 << 30)))  # type: ignore[arg-type]


def table_camera(rng: np.random.Generator) -> Camera:
    """Return a camera near CLEVR's position."""
    # CLEVR's generator jitters its camera likewise, so a model cannot memorize one view.
    jitter = rng.uniform(-0.5, 0.5, 3)
    return Camera((6.2 + float(jitter[0]), -5.9 + float(jitter[1]), 7.0 + float(jitter[2])), (0.0, 0.0, 0.0), 46.0)


def _table(rng: np.random.Generator, kind: Kind, max_objects: int) -> ObjectScene:
    camera = table_camera(rng)
    painted = kind == "clevrtex"
    count = int(rng.integers(min(3, max_objects), max_objects + 1))
    solids = _place_solids(rng, [_solid(rng, painted) for _ in range(count)], camera)
    stage = Stage()
    if painted:
        ground = tuple(float(c) for c in rng.uniform(0.05, 0.7, 3))
        stage = Stage(ground=ground, texture=texture(rng, (0.3, 1.0)))  # type: ignore[arg-type]
    return ObjectScene(kind, solids, camera, stage)


def _place_solids(
    rng: np.random.Generator, solids: list[Solid], camera: Camera, reach: float = REACH
) -> tuple[Solid, ...]:
    """Place solids apart from each other, with a margin to the left or right and in front or behind."""
    right, _, forward = (axis[:2] / np.linalg.norm(axis[:2]) for axis in camera.axes())
    # Start over if one solid finds no place, as CLEVR does; otherwise crowded scenes would have a pattern.
    while True:
        arrangement: list[Solid] = []
        for solid in solids:
            for _ in range(50):
                at = rng.uniform(-reach, reach, 2)
                # Use CLEVR's radii instead of ours: its cube is as wide as the sphere's circle on the ground.
                separations = [(at - (o.x, o.y), RADII[o.size] + RADII[solid.size]) for o in arrangement]
                if all(
                    np.hypot(*d) > both + _MIN_GAP and min(abs(d @ right), abs(d @ forward)) > _MARGIN
                    for d, both in separations
                ):
                    arrangement.append(solid._replace(x=float(at[0]), y=float(at[1])))
                    break
        if len(arrangement) == len(solids):
            return tuple(arrangement)


def _room(rng: np.random.Generator, kind: Kind, test: str) -> ObjectScene:
    count = {"empty_room": 0, "six_objects": 6, "identical_color": int(rng.integers(4, 7))}.get(
        test, int(rng.integers(1, 4))
    )
    solids = [_solid(rng) for _ in range(count)]
    if test == "identical_color":
        solids = [s._replace(color=solids[0].color) for s in solids]
    angle = float(rng.uniform(0, 2 * np.pi))
    eye = (5.4 * float(np.cos(angle)), 5.4 * float(np.sin(angle)), float(rng.uniform(2.6, 3.4)))
    camera = Camera(eye, (0.0, 0.0, 0.3), 52.0)
    # Floor, wall and sky may have any colour, so objects also differ from them by shape.
    hues = rng.uniform(0.05, 0.8, (3, 3))
    floor, wall, sky = (tuple(float(c) for c in row) for row in hues)
    far, top = _WALL + 6.0, 2.2 - 2 * _WALL  # four walls of height 2.2, with the camera inside
    walls = [Body("cube", wall, False, _WALL, (x * far, y * far, top)) for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1))]  # type: ignore[arg-type]
    arrangement = _place_solids(rng, solids, camera, 2.4)
    return ObjectScene(kind, arrangement, camera, Stage(floor, sky), tuple(walls))  # type: ignore[arg-type]


class ObjectSetConfig(Frozen):
    """Options of rendering. Equal configs give equal bytes."""

    kind: Kind = field(
        "clevr",
        "clevr: solids on grey; clevrtex: solids with patterns; rooms: coloured rooms with few objects; "
        "rooms_background: the same, with labels for floor, sky and walls.",
    )
    seed: int = field(0, "Random seed of all scenes.")
    size: int = field(64, "Image side in pixels.", ge=16, le=4096)
    train: int = field(20_000, "Scenes for training.", gt=0)
    test: int = field(500, "Number of scenes in each evaluation set.", gt=0)
    max_objects: int = field(
        6,
        "Maximum number of objects per scene. The minimum is three, or max_objects if that is lower. Not used "
        "for rooms, which have one to three objects (other numbers in the out-of-distribution test sets).",
        gt=0,
        le=10,
    )
    per_shard: int = field(1000, "Scenes per shard.", gt=0)
    antialias: int = field(1, "Rays along each side of a pixel: N gives N x N rays per pixel.", ge=1, le=8)


def render_objects(
    root: Path, config: ObjectSetConfig, processes: int = 2, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Render everything to `root`; existing shards are kept, so an interrupted call can be continued.

    Args:
        root, config, processes: folder, options, number of processes.
        on_progress: called with (finished scenes, number of scenes) after each shard.

    Raises:
        DataError: `root` contains scenes of another config.
    """
    write_manifest(root, config, "objects.json")
    tests = ("", *(ROOM_TESTS if config.kind in _ROOMS else ()))
    shards = -(-config.train // config.per_shard)
    jobs: list[tuple[Callable[..., int], tuple[Any, ...]]] = [(_shard, (root, config, i)) for i in range(shards)]
    jobs += [(_test_set, (root, config, test)) for test in tests]
    run_jobs(jobs, processes, config.train + len(tests) * config.test, on_progress)


def _shard(root: Path, config: ObjectSetConfig, number: int) -> int:
    numbers = range(number * config.per_shard, min(config.train, (number + 1) * config.per_shard))
    path = root / "train" / f"{number:05d}.tar"
    if not path.exists():
        write_shard(path, _samples(config, "train", numbers))
    return len(numbers)


def _test_set(root: Path, config: ObjectSetConfig, test: str) -> int:
    folder = root / (test or "masks")
    if not (folder / "test/nshards.txt").exists():
        write_wds_layout(folder, _samples(config, "test", range(config.test), test))
    return config.test


def _samples(config: ObjectSetConfig, split: str, numbers: range, test: str = "") -> Iterator[tuple[str, Fields]]:
    for number in numbers:
        scene, frame = object_scene(
            config.kind, config.seed, split, number, config.size, config.max_objects, config.antialias, test
        )
        fields = {"png": encode_image(frame.rgb), "mask.png": encode_image(frame.mask)}
        yield f"{number:08d}", {**fields, "json": json.dumps(scene.graph(frame)).encode()}
