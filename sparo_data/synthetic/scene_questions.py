"""Rendered stand-ins of compositional sets, in the files of Winoground, ColorSwap, ARO and NegBench, and of COCO-Stuff.

ROOT/winoground/    examples.jsonl, images/          two objects that exchange their places
ROOT/colorswap/     test.json, images/               two objects that exchange their colours
ROOT/aro/           visual_genome_relation.json, visual_genome_attribution.json, images/
ROOT/aro/coco_order/  order.json, images/            captions with four wrong orders of their words
ROOT/coco_stuff/    shards of images with the colour of each pixel's object, which captions name
ROOT/negbench/      COCO_val_mcq_llama3.1_rephrased.csv, val2017/     captions with and without negation

The scenes are those of `sparo data scenes` (scenes.py) with other random numbers, so a model that was trained on them
has seen neither these images nor captions with negation.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparo_train.core.config import Frozen, field
from sparo_train.core.files import write_whole
from sparo_train.core.rng import generator

from ..pool import run_jobs
from ..writer import encode_image, write_manifest, write_wds_layout
from .scenes import (
    COLORS,
    HELD_OUT,
    MATERIALS,
    OPPOSITE,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    join,
    sample_object,
    sample_scene,
)

_ATTRIBUTES = [
    ("size", *SIZES),
    ("size", *reversed(SIZES)),
    ("material", *MATERIALS),
    ("material", *reversed(MATERIALS)),
]
_COLOR = ("color",)


class SceneQuestionsConfig(Frozen):
    """Options of the questions. Equal configs give equal files."""

    seed: int = field(0, "Random seed of all scenes.")
    size: int = field(64, "Image side in pixels.", ge=16)
    questions: int = field(
        300,
        "Number of questions in each set. ARO's score counts a pair of attributes only if it has at least 25 questions.",
        ge=120,
    )
    antialias: int = field(2, "Rays along each side of a pixel: N gives N x N rays per pixel.", ge=1)


def render_questions(
    root: Path,
    config: SceneQuestionsConfig,
    processes: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Render all sets to `root`; finished sets are kept, so an interrupted call can be continued.

    Raises:
        DataError: `root` contains questions of another config.
    """
    write_manifest(root, config, "scene_questions.json")
    makers = (_winoground, _colorswap, _relations, _attributes, _orders, _negation, _segmentation)
    jobs = [(make, (root, config)) for make in makers]
    run_jobs(jobs, processes, len(jobs) * config.questions, on_progress)


def _save(root: Path, name: str, scene: Scene, config: SceneQuestionsConfig) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_image(scene.render(config.size, config.antialias).rgb))
    return name


def _place(rng: np.random.Generator, first: SceneObject, second: SceneObject, relation: str) -> Scene:
    """Return a scene in which the first object has this relation to the second, and no other one in the other direction."""
    while True:
        scene = sample_scene(rng, 2, objects=[first, second])
        if relation in scene.relation(0, 1):
            return scene


def _draw_two(rng: np.random.Generator) -> tuple[SceneObject, SceneObject]:
    """Return objects of different colours and shapes whose colours may be exchanged."""
    while True:
        a, b = sample_object(rng), sample_object(rng)
        exchanged = {(a.color, b.shape), (b.color, a.shape)}
        if a.color != b.color and a.shape != b.shape and not exchanged & HELD_OUT:
            return a, b


def _rngs(config: SceneQuestionsConfig, name: str) -> Iterator[tuple[int, np.random.Generator]]:
    for index in range(config.questions):
        yield index, generator(config.seed, "scenes", "questions", name, index)


def _winoground(root: Path, config: SceneQuestionsConfig) -> int:
    """Write two scenes of the same objects, whose places are exchanged, with captions of the same words."""
    folder, lines = root / "winoground", list[str]()
    for index, rng in () if (folder / "examples.jsonl").exists() else _rngs(config, "winoground"):
        a, b = _draw_two(rng)
        relation = str(rng.choice(list(OPPOSITE)))
        row: dict[str, Any] = {"id": index}
        for place, (first, second) in enumerate(((a, b), (b, a))):
            name = f"ex_{index}_img_{place}"
            _save(folder, f"images/{name}.png", _place(rng, first, second, relation), config)
            row |= {
                f"image_{place}": name,
                f"caption_{place}": f"{first.phrase(_COLOR)} {relation} {second.phrase(_COLOR)}",
            }
        tags = {"tag": relation, "secondary_tag": "", "num_main_preds": 1, "collapsed_tag": "Relation"}
        lines.append(json.dumps({**row, **tags}))
    if lines:
        write_whole(folder / "examples.jsonl", "\n".join(lines) + "\n")
    return config.questions


def _colorswap(root: Path, config: SceneQuestionsConfig) -> int:
    folder, rows = root / "colorswap", list[dict[str, Any]]()
    for index, rng in () if (folder / "test.json").exists() else _rngs(config, "colorswap"):
        a, b = _draw_two(rng)
        c, d = a._replace(color=b.color), b._replace(color=a.color)
        row: dict[str, Any] = {"id": index, "image_source": "rendered", "caption_source": "generated"}
        for place, (first, second) in enumerate(((a, b), (c, d)), 1):
            scene = sample_scene(rng, 2, objects=[first, second])
            name = _save(folder, f"images/img_{index}_{place}.png", scene, config)
            row |= {f"image_{place}": name, f"caption_{place}": f"{first.phrase(_COLOR)} and {second.phrase(_COLOR)}"}
        rows.append(row)
    if rows:
        write_whole(folder / "test.json", json.dumps(rows))
    return config.questions


def _aro(
    root: Path,
    config: SceneQuestionsConfig,
    file: str,
    question: Callable[[np.random.Generator, int], tuple[Scene, dict[str, Any]]],
) -> int:
    """Write a file of ARO: a scene per question, in a region that is the whole image."""
    folder, rows, stem = (root / file).parent, list[dict[str, Any]](), Path(file).stem
    for index, rng in () if (root / file).exists() else _rngs(config, stem):
        scene, row = question(rng, index)
        name = _save(folder / "images", f"{stem}_{index}.png", scene, config)
        box = {"bbox_x": 0, "bbox_y": 0, "bbox_w": config.size, "bbox_h": config.size}
        rows.append({"image_path": name, **box, **row})
    if rows:
        write_whole(root / file, json.dumps(rows))
    return config.questions


def _relations(root: Path, config: SceneQuestionsConfig) -> int:
    def question(rng: np.random.Generator, index: int) -> tuple[Scene, dict[str, Any]]:
        a, b = _draw_two(rng)
        relation = str(rng.choice(list(OPPOSITE)))
        true, false = (f"{x.phrase(_COLOR)} {relation} {y.phrase(_COLOR)}" for x, y in ((a, b), (b, a)))
        return _place(rng, a, b, relation), {"true_caption": true, "false_caption": false, "relation_name": relation}

    return _aro(root, config, "aro/visual_genome_relation.json", question)


def _attributes(root: Path, config: SceneQuestionsConfig) -> int:
    def question(rng: np.random.Generator, index: int) -> tuple[Scene, dict[str, Any]]:
        # In turn, because pairs with fewer than 25 questions are not scored.
        kind, one, other = _ATTRIBUTES[index % len(_ATTRIBUTES)]
        a, b = (thing._replace(**{kind: value}) for thing, value in zip(_draw_two(rng), (one, other), strict=True))
        texts = []
        for x, y in ((a, b), (a._replace(**{kind: other}), b._replace(**{kind: one}))):
            texts.append(f"{x.phrase((kind,))} and {y.phrase((kind,))}")
        return sample_scene(rng, 2, objects=[a, b]), {
            "true_caption": texts[0],
            "false_caption": texts[1],
            "attributes": [one, other],
        }

    return _aro(root, config, "aro/visual_genome_attribution.json", question)


def _orders(root: Path, config: SceneQuestionsConfig) -> int:
    """Write captions with four wrong orders of their words, shuffled as in ARO."""

    def question(rng: np.random.Generator, index: int) -> tuple[Scene, dict[str, Any]]:
        a, b = _draw_two(rng)
        relation = str(rng.choice(list(OPPOSITE)))
        text = f"{a.phrase()} {relation} {b.phrase()}"
        return _place(rng, a, b, relation), {"captions": [text, *shuffle_words(text, rng)]}

    return _aro(root, config, "aro/coco_order/order.json", question)


def shuffle_words(text: str, rng: np.random.Generator) -> list[str]:
    """Return the caption with exchanged nouns and adjectives, other words, words within trigrams, and trigrams (Yuksekgonul et al. 2023).

    Orders equal to the original are drawn again, if there are others.
    """
    words = text.split()
    adjectives = {*COLORS, *SIZES, *MATERIALS}
    nouns = [i for i, word in enumerate(words) if word in SHAPES]
    described = [i for i, word in enumerate(words) if word in adjectives]
    others = [i for i in range(len(words)) if i not in {*nouns, *described}]
    trigrams = [list(range(i, min(i + 3, len(words)))) for i in range(0, len(words), 3)]

    def exchange(groups: Sequence[Sequence[int]]) -> str:
        order = list(words)
        for group in groups:
            for place, source in zip(group, rng.permutation(group), strict=True):
                order[place] = words[int(source)]
        return " ".join(order)

    def reorder() -> str:
        return " ".join(words[i] for j in rng.permutation(len(trigrams)) for i in trigrams[int(j)])

    makers = (lambda: exchange([nouns, described]), lambda: exchange([others]), lambda: exchange(trigrams), reorder)
    return [next((order for order in (make() for _ in range(20)) if order != text), text) for make in makers]


def _negation(root: Path, config: SceneQuestionsConfig) -> int:
    """Write multiple-choice questions: which objects a scene has and lacks, with wrong captions of all three kinds, as in NegBench."""
    folder, names = root / "negbench", [f"caption_{i}" for i in range(4)]
    path = folder / "COCO_val_mcq_llama3.1_rephrased.csv"
    rows = [["image_path", "correct_answer", *names, "correct_answer_template"]]
    for index, rng in () if path.exists() else _rngs(config, "negation"):
        a, b = _draw_two(rng)
        while (absent := sample_object(rng).phrase(_COLOR)) in (a.phrase(_COLOR), b.phrase(_COLOR)):
            pass
        has, also = (str(phrase) for phrase in rng.permutation([a.phrase(_COLOR), b.phrase(_COLOR)]))
        right = {"positive": join([has, also]), "negative": f"no {absent[2:]}", "hybrid": f"{has} but no {absent[2:]}"}
        wrong = [f"{absent} but no {has[2:]}", join([has, absent]), f"no {also[2:]}"]
        kind = ("positive", "negative", "hybrid")[index % 3]
        image = _save(folder, f"val2017/{index:012d}.png", sample_scene(rng, 2, objects=[a, b]), config)
        rows.append([image, "0", right[kind], *wrong, kind])
    if len(rows) > 1:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(rows)
        write_whole(path, stream.getvalue())
    return config.questions


def _segmentation(root: Path, config: SceneQuestionsConfig) -> int:
    """Write scenes of two to four objects of different colours, whose pixels are labelled with their colour, as a set for zero-shot segmentation."""
    folder, colors = root / "coco_stuff", list(COLORS)

    def sample(index: int, rng: np.random.Generator) -> tuple[str, dict[str, bytes]]:
        chosen = rng.permutation(colors)[: int(rng.integers(2, 5))]
        objects = [_draw_with_color(rng, str(color)) for color in chosen]
        frame = sample_scene(rng, len(objects), objects=objects).render(config.size, config.antialias)
        # 255 is not counted: no caption names the ground.
        labels = np.array([255, *(colors.index(thing.color) for thing in objects)], np.uint8)
        fields = {"png": encode_image(frame.rgb), "semantic.png": encode_image(labels[frame.mask])}
        return f"{index:06d}", {**fields, "mask.png": encode_image(frame.mask)}

    if not (folder / "test/nshards.txt").exists():
        samples = (sample(index, rng) for index, rng in _rngs(config, "segmentation"))
        write_wds_layout(folder, samples, classnames=colors, templates=[f"a {{c}} {shape}" for shape in SHAPES])
    return config.questions


def _draw_with_color(rng: np.random.Generator, color: str) -> SceneObject:
    while True:
        thing = sample_object(rng)._replace(color=color)
        if not thing.held_out:
            return thing
