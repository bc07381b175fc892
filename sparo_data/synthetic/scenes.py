"""The default data: captioned scenes of a few coloured solids, rendered here, deterministic in (seed, split, index).

A scene is its graph (shape, colour, material, size, position per object). Image, masks and captions are derived from
the graph. Six of the 24 colour-shape pairs never occur in training: they are the held-out classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.rng import generator

from ..tracer.render import Body, Camera, Frame, project, render
from ..tracer.solids import Shape

SHAPES: tuple[Shape, ...] = ("sphere", "cube", "cylinder")
COLORS: dict[str, tuple[float, float, float]] = {  # linear light
    "red": (0.60, 0.03, 0.03),
    "blue": (0.03, 0.07, 0.60),
    "green": (0.03, 0.40, 0.06),
    "yellow": (0.75, 0.62, 0.02),
    "purple": (0.30, 0.03, 0.50),
    "cyan": (0.02, 0.55, 0.60),
    "brown": (0.22, 0.09, 0.03),
    "gray": (0.16, 0.16, 0.17),
}
MATERIALS = ("rubber", "metal")
SIZES = {"small": 0.42, "large": 0.72}
HELD_OUT = frozenset(
    {
        ("red", "cylinder"),
        ("blue", "sphere"),
        ("green", "cube"),
        ("yellow", "sphere"),
        ("purple", "cube"),
        ("cyan", "cylinder"),
    }
)
RELATIONS = {"to the left of": "to the right of", "in front of": "behind"}
OPPOSITE = {**RELATIONS, **{b: a for a, b in RELATIONS.items()}}
CLASSES = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
TEMPLATES = ["a {c}", "a picture of a {c}", "a small {c}", "a large {c}", "a rubber {c}", "a metal {c}"]


class SceneObject(NamedTuple):
    """One object of a scene graph; x, y in world units, yaw in radians."""

    size: str
    color: str
    material: str
    shape: Shape
    x: float
    y: float
    yaw: float

    @property
    def held_out(self) -> bool:
        return (self.color, self.shape) in HELD_OUT

    def body(self) -> Body:
        return Body(
            self.shape,
            COLORS[self.color],
            self.material == "metal",
            SIZES[self.size],
            (self.x, self.y, 0.0),
            self.yaw,
        )

    def phrase(self, words: tuple[str, ...] = ("size", "color", "material")) -> str:
        """Return `a large red metal cube`, with the attributes named in `words`."""
        return " ".join(["a", *(getattr(self, w) for w in ("size", "color", "material") if w in words), self.shape])


class Scene(NamedTuple):
    """A scene graph and its camera."""

    objects: tuple[SceneObject, ...]
    camera: Camera

    def render(self, size: int, antialias: int = 2) -> Frame:
        return render([t.body() for t in self.objects], self.camera, size, antialias)

    def graph(self) -> dict[str, Any]:
        """Return the scene as plain data, for the sample's JSON; mask value i+1 is object i."""
        return {
            "objects": [t._asdict() for t in self.objects],
            "camera": {"eye": self.camera.eye, "target": self.camera.target, "fov": self.camera.fov},
        }

    def relation(self, a: int, b: int) -> list[str]:
        """Return the relations of object a to object b, as seen by the camera; none if they are close."""
        ax, _, ad = project(self.camera, self.objects[a].body().centre)
        bx, _, bd = project(self.camera, self.objects[b].body().centre)
        relations = []
        if abs(ax - bx) > 0.25:
            relations.append("to the left of" if ax < bx else "to the right of")
        if abs(ad - bd) > 1.0:
            relations.append("in front of" if ad < bd else "behind")
        return relations


def sample_object(rng: np.random.Generator, held_out: bool | None = False) -> SceneObject:
    """Sample attributes uniformly. `held_out` False: training pairs only, True: held-out pairs only, None: any pair."""
    while True:
        thing = SceneObject(
            str(rng.choice(list(SIZES))), str(rng.choice(list(COLORS))), str(rng.choice(MATERIALS)), SHAPES[int(rng.integers(len(SHAPES)))], 0, 0, 0
        )  # fmt: skip
        if held_out is None or thing.held_out == held_out:
            return thing


def sample_scene(
    rng: np.random.Generator, count: int, held_out: bool | None = False, objects: list[SceneObject] | None = None
) -> Scene:
    """Place `count` objects (or the given ones) without contact or occlusion; the camera jitters slightly."""
    while True:
        candidates = objects or [sample_object(rng, held_out) for _ in range(count)]
        arrangement: list[SceneObject] = []
        for thing in candidates:
            for _ in range(40):
                x, y = rng.uniform(-2.1, 2.1), rng.uniform(-2.0, 1.6)
                # Seen from above and in front, depth occludes more than width.
                has_clearance = [
                    np.hypot(x - o.x, (y - o.y) * 0.75) > SIZES[o.size] + SIZES[thing.size] + 0.25 for o in arrangement
                ]
                if all(has_clearance):
                    arrangement.append(thing._replace(x=float(x), y=float(y), yaw=float(rng.uniform(0, np.pi / 2))))
                    break
        # Otherwise start over, because a scene that is crowded by its first object stays crowded.
        if len(arrangement) == len(candidates):
            eye = (
                float(rng.uniform(-0.8, 0.8)),
                float(rng.uniform(-9.4, -8.6)),
                float(rng.uniform(5.2, 6.0)),
            )
            return Scene(tuple(arrangement), Camera(eye))


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """Return a true caption: one object, two in a relation, or a list; attributes are named at random, colour almost always."""
    # The same attributes for all objects of a caption; otherwise they would reveal which object was named first.
    words = tuple(w for w, p in (("size", 0.4), ("color", 0.95), ("material", 0.4)) if rng.random() < p)
    order = [int(i) for i in rng.permutation(len(scene.objects))]
    if len(order) == 1:
        phrase = scene.objects[0].phrase(words)
        return f"a picture of {phrase}" if rng.random() < 0.2 else phrase
    # A random pair, so that captions do not name the nearest or largest object first.
    relations = scene.relation(order[0], order[1])
    if relations and rng.random() < 0.6:
        relation = relations[int(rng.integers(len(relations)))]
        return f"{scene.objects[order[0]].phrase(words)} {relation} {scene.objects[order[1]].phrase(words)}"
    return join([scene.objects[i].phrase(words) for i in order])


def join(phrases: list[str]) -> str:
    """Join phrases as `a, b and c`."""
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


def training_scene(seed: int, index: int) -> tuple[Scene, str]:
    """Return scene `index` of the training split: one to four objects, no held-out pair, and its caption."""
    rng = generator(seed, "scenes", "train", index)
    scene = sample_scene(rng, int(rng.choice([1, 2, 3, 4], p=[0.3, 0.4, 0.2, 0.1])))
    return scene, caption(scene, rng)
