"""Writer of the rendered data set: training shards and four evaluation sets.

ROOT/train/00000.tar …      key.jpg key.txt key.json (scene graph) key.mask.png (value i+1: object i)
ROOT/zeroshot/              24 colour-shape classes, one object per image        (clip-benchmark's wds layout)
ROOT/zeroshot_heldout/      images of the six pairs that never occur in training, classified among all 24
ROOT/retrieval/             scenes of two to four objects, with unique captions
ROOT/pairs/                 key.jpg key.json {"kind", "caption", "negative_caption"}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparo_train.core.config import Frozen, field
from sparo_train.core.rng import generator

from ..pool import run_jobs
from ..writer import Fields, encode_image, write_manifest, write_shard, write_wds_layout
from .scenes import (
    CLASSES,
    COLORS,
    HELD_OUT,
    MATERIALS,
    OPPOSITE,
    SHAPES,
    SIZES,
    TEMPLATES,
    Scene,
    SceneObject,
    caption,
    join,
    sample_object,
    sample_scene,
    training_scene,
)

_VALUES = {"size": list(SIZES), "color": list(COLORS), "material": list(MATERIALS), "shape": list(SHAPES)}
_DEFAULT_WORDS = ("color",)

ScenePair = tuple[Scene, str, str]  # scene, true caption, false caption


# Compositional caption pairs over rendered scenes, after SugarCrepe's seven kinds but without its shortcuts. The true
# and the false caption of a pair make equally many statements and come from the same distribution: a replaced attribute
# is drawn uniformly from the others, the side of a relation is a coin flip, and `add` compares a true addition with a
# false one instead of a longer caption with a shorter one. evals.tasks.textonly measures that the text alone decides
# nothing.
def make_pair(kind: str, rng: np.random.Generator) -> ScenePair:
    """Return a pair of the given kind (a key of `KINDS`); samples until the false caption is false for the whole scene."""
    while True:
        pair = KINDS[kind](rng)
        if pair is not None:
            return pair


def _sample_related_pair(rng: np.random.Generator) -> tuple[Scene, str] | None:
    """Return a scene of two objects with different colours, and the relation of the first to the second."""
    a, b = sample_object(rng), sample_object(rng)
    # With equal colours, a caption that names colours would be true for both objects.
    if a.color == b.color:
        return None
    scene = sample_scene(rng, 2, objects=[a, b])
    relations = scene.relation(0, 1)
    return (scene, relations[int(rng.integers(len(relations)))]) if relations else None


def _change(
    obj: SceneObject, attribute: str, scene: Scene, rng: np.random.Generator, words: tuple[str, ...]
) -> SceneObject | None:
    """Return another value of an attribute, such that no object of the scene matches the new phrase and the pair is not held out."""
    value = str(rng.choice([v for v in _VALUES[attribute] if v != getattr(obj, attribute)]))
    other = obj._replace(**{attribute: value})
    # Compare by the words of the caption only: an object that differs in other attributes matches the phrase, too.
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
        # Both sides equally often, so that a model that only reads the first object has no advantage.
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
    # Two objects with the same colour and shape would be described twice by the same words.
    scene = sample_scene(rng, 2)
    a, b = (t.phrase(_DEFAULT_WORDS) for t in scene.objects)
    # From the distribution of existing objects, so that the added object has no rarer words.
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


class ScenesConfig(Frozen):
    """Options of rendering. Equal configs give equal bytes."""

    seed: int = field(0, "Random seed of all scenes.")
    size: int = field(64, "Image side in pixels.", ge=16)
    train: int = field(8000, "Scenes for training.", gt=0)
    per_shard: int = field(500, "Scenes per shard.", gt=0)
    per_class: int = field(20, "Images per class of the zero-shot sets.", gt=0)
    retrieval: int = field(400, "Scenes of the retrieval set.", gt=0)
    pairs_per_kind: int = field(150, "Number of caption pairs (a right and a wrong caption) of each kind.", gt=0)
    antialias: int = field(2, "Rays along each side of a pixel: N gives N x N rays per pixel.", ge=1)
    masks: bool = field(True, "Also write a mask per object.")


def render_scenes(
    root: Path, config: ScenesConfig, processes: int = 2, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Render everything to `root`; existing shards are kept, so an interrupted call can be continued.

    Args:
        root, config, processes: folder, options, number of processes.
        on_progress: called with (finished scenes, number of scenes) after each shard.

    Raises:
        DataError: `root` contains scenes of another config.
    """
    write_manifest(root, config, "scenes.json")
    shards = -(-config.train // config.per_shard)
    jobs: list[tuple[Callable[..., int], tuple[Any, ...]]] = [(_train_shard, (root, config, i)) for i in range(shards)]
    # Jobs of similar size, one file each, so that an interruption loses at most one file per process.
    jobs += [(job, (root, config, i)) for job, i in ((_zeroshot, 0), (_zeroshot, 1), (_retrieval, 0), (_pairs, 0))]
    total = (
        config.train
        + (len(CLASSES) + len(HELD_OUT)) * config.per_class
        + config.retrieval
        + len(KINDS) * config.pairs_per_kind
    )
    run_jobs(jobs, processes, total, on_progress)


def _fields(
    scene: Scene, config: ScenesConfig, text: str | None = None, masks: bool = False, **extra: object
) -> dict[str, bytes]:
    frame = scene.render(config.size, config.antialias)
    fields = {"jpg": encode_image(frame.rgb, "JPEG", quality=95)}
    if text is not None:
        fields["txt"] = text.encode()
    fields["json"] = json.dumps({**extra, **scene.graph()}).encode()
    if masks:
        fields["mask.png"] = encode_image(frame.mask)
    return fields


def _train_shard(root: Path, config: ScenesConfig, number: int) -> int:
    first, last = number * config.per_shard, min(config.train, (number + 1) * config.per_shard)

    def samples() -> Iterator[tuple[str, Fields]]:
        for index in range(first, last):
            scene, text = training_scene(config.seed, index)
            yield f"{index:08d}", _fields(scene, config, text, config.masks)

    path = root / "train" / f"{number:05d}.tar"
    if not path.exists():
        write_shard(path, samples())
    return last - first


def _zeroshot(root: Path, config: ScenesConfig, held_out: int) -> int:
    classes = [c for c in CLASSES if tuple(c.split()) in HELD_OUT] if held_out else CLASSES
    name = "zeroshot_heldout" if held_out else "zeroshot"

    def samples() -> Iterator[tuple[str, Fields]]:
        for words in classes:
            label, (color, shape) = CLASSES.index(words), words.split()
            for index in range(config.per_class):
                rng = generator(config.seed, "scenes", name, label, index)
                scene = sample_scene(rng, 1, objects=[sample_object(rng)._replace(color=color, shape=shape)])
                yield f"{label:03d}_{index:05d}", {**_fields(scene, config), "cls": str(label).encode()}

    if not (root / name / "test" / "nshards.txt").exists():
        write_wds_layout(root / name, samples(), classnames=CLASSES, templates=TEMPLATES)
    return len(classes) * config.per_class


def _retrieval(root: Path, config: ScenesConfig, _: int) -> int:
    def samples() -> Iterator[tuple[str, Fields]]:
        captions: set[str] = set()
        index = 0
        while len(captions) < config.retrieval:
            rng = generator(config.seed, "scenes", "retrieval", index)
            index += 1
            scene = sample_scene(rng, int(rng.integers(2, 5)))
            # Half of them without relations, like captions in training.
            text = join([t.phrase() for t in scene.objects]) if rng.random() < 0.5 else caption(scene, rng)
            # Two scenes with the same caption could not be distinguished by it.
            if text not in captions:
                captions.add(text)
                yield f"{len(captions):06d}", _fields(scene, config, text)

    if not (root / "retrieval" / "test" / "nshards.txt").exists():
        write_wds_layout(root / "retrieval", samples(), dataset_type="retrieval")
    return config.retrieval


def _pairs(root: Path, config: ScenesConfig, _: int) -> int:
    def samples() -> Iterator[tuple[str, Fields]]:
        for kind in KINDS:
            for index in range(config.pairs_per_kind):
                scene, true, false = make_pair(kind, generator(config.seed, "scenes", "pairs", kind, index))
                yield (
                    f"{kind}_{index:05d}",
                    _fields(scene, config, kind=kind, caption=true, negative_caption=false),
                )

    if not (root / "pairs" / "test" / "nshards.txt").exists():
        write_wds_layout(root / "pairs", samples(), dataset_type="pairs")
    return len(KINDS) * config.pairs_per_kind
