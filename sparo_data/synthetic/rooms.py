"""The four rooms of `nature_ego`: walls, a tree, an arch, a snowman and a tower, built of the ray tracer's solids."""

from __future__ import annotations

from functools import cache

from ..tracer.render import Body, Stage
from ..tracer.solids import Texture

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
    """Return all bodies that do not move."""
    return (*_walls(), *_tree(), *_arch(), *_snowman(), *_tower())


def _wall(x: float, y: float, along: str, color: tuple[float, float, float], texture: Texture | None) -> Body:
    wide = (HALF + _THICK, _THICK, _HIGH) if along == "x" else (_THICK, HALF + _THICK, _HIGH)
    # A body's foot is one radius below its centre, whatever its stretch.
    return Body("cube", color, False, 1.0, (x, y, _HIGH - 1), texture=texture, stretch=wide)


def _walls() -> list[Body]:
    side, step = 2 * (HALF + _THICK), HALF + _THICK
    bricks = Texture("checker", (0.5, 0.24, 0.16), 3.0)
    walls = []
    for at in (-step, step):
        outer = [(at, -side, "x"), (at, side, "x"), (-side, at, "y"), (side, at, "y")]
        walls += [_wall(x, y, along, _BRICK, bricks) for x, y, along in outer]
        # Inside, two walls have their own colours, so that a turning observer can orient itself.
        walls += [_wall(at, 0.0, "x", (0.55, 0.5, 0.4), None), _wall(0.0, at, "y", (0.35, 0.45, 0.5), None)]
    return walls


def _place_at(room: int, dx: float, dy: float) -> tuple[float, float]:
    x, y = ((-1, -1), (1, -1), (-1, 1), (1, 1))[room]
    return x * (HALF + _THICK) + dx, y * (HALF + _THICK) + dy


def _tree() -> list[Body]:
    x, y = _place_at(0, 0, 0)
    return [
        Body("cylinder", _WOOD, False, 0.3, (x, y, 0.0)),
        Body("cone", _LEAF, False, 0.9, (x, y, 0.5)),
        Body("cone", _LEAF, False, 0.65, (x, y, 1.5)),
    ]


def _arch() -> list[Body]:
    sides = [
        Body("cube", _STONE, False, 0.3, (*_place_at(1, side, 0.0), 0.45), stretch=(1, 1, 2.5)) for side in (-0.8, 0.8)
    ]
    return [*sides, Body("cube", _STONE, False, 0.3, (*_place_at(1, 0.0, 0.0), 1.5), stretch=(3.7, 1, 1))]


def _snowman() -> list[Body]:
    x, y = _place_at(2, 0, 0)
    return [
        Body("sphere", _SNOW, False, 0.8, (x, y, 0.0)),
        Body("sphere", _SNOW, False, 0.55, (x, y, 1.3)),
        Body("monkey", _SNOW, False, 0.4, (x, y, 2.2)),
    ]


def _tower() -> list[Body]:
    x, y = _place_at(3, 0, 0)
    return [
        Body("cube", (0.1, 0.2, 0.45), False, 0.6, (x, y, 0.0), 0.3),
        Body("cube", (0.5, 0.4, 0.05), False, 0.42, (x, y, 1.2), 0.9),
        Body("torus", (0.5, 0.1, 0.3), True, 0.5, (x, y, 1.69)),
        Body("icosahedron", (0.1, 0.4, 0.35), True, 0.4, (x, y, 2.1)),
    ]
