"""Compositional caption pairs over rendered scenes, after SugarCrepe's seven kinds, without its shortcuts.

True and false captions of a pair make equally many statements and are drawn from the same distribution: a replaced
attribute is drawn evenly among the others, a relation's side is a coin flip, and `add` compares a true addition with
a false one instead of a longer caption with a shorter one. evals.tasks.textonly measures that text alone decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .scenes import COLORS, HELD_OUT, MATERIALS, OPPOSITE, SHAPES, SIZES, Scene, Thing, sample_scene, sample_thing

_VALUES = {"size": list(SIZES), "color": list(COLORS), "material": list(MATERIALS), "shape": list(SHAPES)}
_SAY = ("color",)

ScenePair = tuple[Scene, str, str]  # scene, true caption, false caption


def make_pair(kind: str, rng: np.random.Generator) -> ScenePair:
    """A pair of the given kind (a key of `KINDS`); draws until the false caption is false of the whole scene."""
    while True:
        pair = KINDS[kind](rng)
        if pair is not None:
            return pair


def _two(rng: np.random.Generator) -> tuple[Scene, str] | None:
    """A scene of two objects in colours of their own, and the relation of the first to the second."""
    a, b = sample_thing(rng), sample_thing(rng)
    # Of two things in one colour a caption by colours would be true of both.
    if a.color == b.color:
        return None
    scene = sample_scene(rng, 2, things=[a, b])
    relations = scene.relation(0, 1)
    return (scene, relations[int(rng.integers(len(relations)))]) if relations else None


def _change(
    thing: Thing, attribute: str, scene: Scene, rng: np.random.Generator, said: tuple[str, ...]
) -> Thing | None:
    """Another value of one attribute, such that no object of the scene fits the new phrase and no held-out pair arises."""
    value = str(rng.choice([v for v in _VALUES[attribute] if v != getattr(thing, attribute)]))
    other = thing._replace(**{attribute: value})
    # By what the caption says of them: a thing that differs in what is not said fits the phrase as well.
    phrases = {t.phrase(said) for t in scene.things}
    return None if other.held_out or other.phrase(said) in phrases else other


def _replace(attribute: str) -> Callable[[np.random.Generator], ScenePair | None]:
    def make(rng: np.random.Generator) -> ScenePair | None:
        found = _two(rng)
        if found is None:
            return None
        scene, relation = found
        said = (*_SAY, attribute) if attribute in ("size", "material") else _SAY
        a, b = scene.things
        # Either side as often: a model that reads the first object alone must not win.
        first = bool(rng.integers(2))
        wrong = _change(a if first else b, attribute, scene, rng, said)
        if wrong is None:
            return None
        false = (wrong, b) if first else (a, wrong)
        return (
            scene,
            f"{a.phrase(said)} {relation} {b.phrase(said)}",
            f"{false[0].phrase(said)} {relation} {false[1].phrase(said)}",
        )

    return make


def _replace_attribute(rng: np.random.Generator) -> ScenePair | None:
    return _replace(str(rng.choice(["color", "size", "material"])))(rng)


def _replace_relation(rng: np.random.Generator) -> ScenePair | None:
    found = _two(rng)
    if found is None:
        return None
    scene, relation = found
    a, b = (t.phrase(_SAY) for t in scene.things)
    return scene, f"{a} {relation} {b}", f"{a} {OPPOSITE[relation]} {b}"


def _swap_object(rng: np.random.Generator) -> ScenePair | None:
    found = _two(rng)
    if found is None:
        return None
    scene, relation = found
    a, b = (t.phrase(_SAY) for t in scene.things)
    return scene, f"{a} {relation} {b}", f"{b} {relation} {a}"


def _swap_attribute(rng: np.random.Generator) -> ScenePair | None:
    found = _two(rng)
    if found is None:
        return None
    scene, relation = found
    a, b = scene.things
    if a.shape == b.shape or (a.color, b.shape) in HELD_OUT or (b.color, a.shape) in HELD_OUT:
        return None
    true = f"{a.phrase(_SAY)} {relation} {b.phrase(_SAY)}"
    return (
        scene,
        true,
        f"{a._replace(color=b.color).phrase(_SAY)} {relation} {b._replace(color=a.color).phrase(_SAY)}",
    )


def _add_object(rng: np.random.Generator) -> ScenePair | None:
    # Two in one colour and shape would make the caption say one of them twice.
    scene = sample_scene(rng, 2)
    a, b = (t.phrase(_SAY) for t in scene.things)
    # Drawn as those that are there: what is added is no rarer a word.
    absent = sample_thing(rng).phrase(_SAY)
    return None if a == b or absent in (a, b) else (scene, f"{a} and {b}", f"{a} and {absent}")


def _add_attribute(rng: np.random.Generator) -> ScenePair | None:
    scene = sample_scene(rng, 1)
    attribute = str(rng.choice(["size", "material"]))
    said = (*_SAY, attribute)
    wrong = _change(scene.things[0], attribute, scene, rng, said)
    return None if wrong is None else (scene, scene.things[0].phrase(said), wrong.phrase(said))


KINDS: dict[str, Callable[[np.random.Generator], ScenePair | None]] = {
    "replace_obj": _replace("shape"),
    "replace_att": _replace_attribute,
    "replace_rel": _replace_relation,
    "swap_obj": _swap_object,
    "swap_att": _swap_attribute,
    "add_obj": _add_object,
    "add_att": _add_attribute,
}
