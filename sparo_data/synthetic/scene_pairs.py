"""Compositional caption pairs over rendered scenes, after SugarCrepe's seven kinds, without its shortcuts.

True and false captions of a pair make equally many statements and are drawn from the same distribution: a replaced
attribute is drawn evenly among the others, a relation's side is a coin flip, and `add` compares a true addition with
a false one instead of a longer caption with a shorter one. evals.tasks.textonly measures that text alone decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .scenes import (
    COLORS,
    HELD_OUT,
    MATERIALS,
    OPPOSITE,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    sample_object,
    sample_scene,
)

_VALUES = {"size": list(SIZES), "color": list(COLORS), "material": list(MATERIALS), "shape": list(SHAPES)}
_DEFAULT_WORDS = ("color",)

ScenePair = tuple[Scene, str, str]  # scene, true caption, false caption


def make_pair(kind: str, rng: np.random.Generator) -> ScenePair:
    """A pair of the given kind (a key of `KINDS`); draws until the false caption is false of the whole scene."""
    while True:
        pair = KINDS[kind](rng)
        if pair is not None:
            return pair


def _sample_related_pair(rng: np.random.Generator) -> tuple[Scene, str] | None:
    """A scene of two objects in colours of their own, and the relation of the first to the second."""
    a, b = sample_object(rng), sample_object(rng)
    # Of two things in one colour a caption by colours would be true of both.
    if a.color == b.color:
        return None
    scene = sample_scene(rng, 2, objects=[a, b])
    relations = scene.relation(0, 1)
    return (scene, relations[int(rng.integers(len(relations)))]) if relations else None


def _change(
    obj: SceneObject, attribute: str, scene: Scene, rng: np.random.Generator, words: tuple[str, ...]
) -> SceneObject | None:
    """Another value of one attribute, such that no object of the scene fits the new phrase and no held-out pair arises."""
    value = str(rng.choice([v for v in _VALUES[attribute] if v != getattr(obj, attribute)]))
    other = obj._replace(**{attribute: value})
    # By what the caption says of them: a thing that differs in what is not said fits the phrase as well.
    phrases = {t.phrase(words) for t in scene.objects}
    return None if other.held_out or other.phrase(words) in phrases else other


def _replace(attribute: str) -> Callable[[np.random.Generator], ScenePair | None]:
    def make(rng: np.random.Generator) -> ScenePair | None:
        sample = _sample_related_pair(rng)
        if sample is None:
            return None
        scene, relation = sample
        words = (*_DEFAULT_WORDS, attribute) if attribute in ("size", "material") else _DEFAULT_WORDS
        a, b = scene.objects
        # Either side as often: a model that reads the first object alone must not win.
        first = bool(rng.integers(2))
        wrong = _change(a if first else b, attribute, scene, rng, words)
        if wrong is None:
            return None
        false = (wrong, b) if first else (a, wrong)
        return (
            scene,
            f"{a.phrase(words)} {relation} {b.phrase(words)}",
            f"{false[0].phrase(words)} {relation} {false[1].phrase(words)}",
        )

    return make


def _replace_attribute(rng: np.random.Generator) -> ScenePair | None:
    return _replace(str(rng.choice(["color", "size", "material"])))(rng)


def _replace_relation(rng: np.random.Generator) -> ScenePair | None:
    sample = _sample_related_pair(rng)
    if sample is None:
        return None
    scene, relation = sample
    a, b = (t.phrase(_DEFAULT_WORDS) for t in scene.objects)
    return scene, f"{a} {relation} {b}", f"{a} {OPPOSITE[relation]} {b}"


def _swap_object(rng: np.random.Generator) -> ScenePair | None:
    sample = _sample_related_pair(rng)
    if sample is None:
        return None
    scene, relation = sample
    a, b = (t.phrase(_DEFAULT_WORDS) for t in scene.objects)
    return scene, f"{a} {relation} {b}", f"{b} {relation} {a}"


def _swap_attribute(rng: np.random.Generator) -> ScenePair | None:
    sample = _sample_related_pair(rng)
    if sample is None:
        return None
    scene, relation = sample
    a, b = scene.objects
    if a.shape == b.shape or (a.color, b.shape) in HELD_OUT or (b.color, a.shape) in HELD_OUT:
        return None
    true = f"{a.phrase(_DEFAULT_WORDS)} {relation} {b.phrase(_DEFAULT_WORDS)}"
    return (
        scene,
        true,
        f"{a._replace(color=b.color).phrase(_DEFAULT_WORDS)} {relation} {b._replace(color=a.color).phrase(_DEFAULT_WORDS)}",
    )


def _add_object(rng: np.random.Generator) -> ScenePair | None:
    # Two in one colour and shape would make the caption say one of them twice.
    scene = sample_scene(rng, 2)
    a, b = (t.phrase(_DEFAULT_WORDS) for t in scene.objects)
    # Drawn as those that are there: what is added is no rarer a word.
    absent = sample_object(rng).phrase(_DEFAULT_WORDS)
    return None if a == b or absent in (a, b) else (scene, f"{a} and {b}", f"{a} and {absent}")


def _add_attribute(rng: np.random.Generator) -> ScenePair | None:
    scene = sample_scene(rng, 1)
    attribute = str(rng.choice(["size", "material"]))
    words = (*_DEFAULT_WORDS, attribute)
    wrong = _change(scene.objects[0], attribute, scene, rng, words)
    return None if wrong is None else (scene, scene.objects[0].phrase(words), wrong.phrase(words))


KINDS: dict[str, Callable[[np.random.Generator], ScenePair | None]] = {
    "replace_obj": _replace("shape"),
    "replace_att": _replace_attribute,
    "replace_rel": _replace_relation,
    "swap_obj": _swap_object,
    "swap_att": _swap_attribute,
    "add_obj": _add_object,
    "add_att": _add_attribute,
}
