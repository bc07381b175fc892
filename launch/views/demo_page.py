"""The demo's page: six scores, examples, slots with their attention, and next commands."""

from __future__ import annotations

import base64
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from jinja2 import Environment
from matplotlib.figure import Figure
from PIL import Image

from evals.encoders.sparo_encoders import ClipEncoder
from evals.report.plots import save_figure
from evals.sets.wds import WdsSet
from evals.slots.attend import attend, informative_slots, top_words, word_profiles
from evals.slots.overlay import image_crop, jpeg, overlay, thumbnail
from evals.tasks.result import Result, format_metric, is_share, wilson
from sparo_train.core.files import write_whole

from .results_table import ScoreRow

_EXAMPLES, _CAPTIONS = 8, 200
# label, task, part
_ROWS = (
    ("Zero-shot, 24 colour-shape classes", "zeroshot", "acc1"),
    ("The six pairs held out of training", "heldout", "acc1"),
    ("Image to its caption, R@5", "retrieval", "text_R@5"),
    ("Caption to its image, R@5", "retrieval", "image_R@5"),
    ("Caption pairs, all kinds", "pairs", "macro"),
    ("Caption pairs, same words in another order", "pairs", "order_only"),
)

_SLOTS, _COLUMNS, _SIZE = 4, 6, 192
_IN_PICTURE = (0, 2, 3, 4)


class SlotTile(NamedTuple):
    """One image under a slot's attention, and the words of its caption that the slot attends to."""

    picture: Image.Image
    words: str


class SlotGallery(NamedTuple):
    """A slot: its words over all captions, and its tiles."""

    number: int
    words: str
    tiles: list[SlotTile]


class DemoSlots(NamedTuple):
    """Images with captions, and the same images under each slot's attention."""

    images: list[tuple[Image.Image, str]]
    slots: list[SlotGallery]


def demo_slots(encoder: ClipEncoder, images: Sequence[Image.Image], captions: Sequence[str]) -> DemoSlots:
    """Select slots by attention over all images, and show them on a few, evenly spaced."""
    attended = attend(encoder, images, captions)
    profiles = word_profiles(attended)
    # One scale per slot, from its median image, so that one image with a very bright patch does not dim all others.
    brightest = torch.stack([one.maps.flatten(1).amax(1) for one in attended]).median(0).values
    some = [i * len(images) // _COLUMNS for i in range(_COLUMNS)]
    galleries = []
    for slot in informative_slots(attended, profiles, _SLOTS):
        tiles = [
            SlotTile(
                overlay(image_crop(encoder, images[i]), attended[i].maps[slot], float(brightest[slot]), _SIZE),
                "  ".join(top_words(attended[i], slot)),
            )
            for i in some
        ]
        words = ", ".join(f"{word} {share:.0%}" for word, share in profiles.of(slot, 4))
        galleries.append(SlotGallery(slot, words, tiles))
    return DemoSlots([(thumbnail(image_crop(encoder, images[i]), _SIZE), captions[i]) for i in some], galleries)


def draw_slots(demo: DemoSlots, path: Path) -> None:
    """Draw a picture with fewer images, for small screens: images on top, then a row per slot."""
    some = _IN_PICTURE
    rows = len(demo.slots) + 1
    figure, axes = plt.subplots(rows, len(some), figsize=(1.9 * len(some), 2.3 * rows), layout="constrained")
    for axis, (picture, caption) in zip(axes[0], (demo.images[i] for i in some), strict=True):
        axis.imshow(picture)
        axis.set_title(textwrap.fill(caption, 22), fontsize=9.5)
    for line, slot in zip(axes[1:], demo.slots, strict=True):
        for axis, tile in zip(line, (slot.tiles[i] for i in some), strict=True):
            axis.imshow(tile.picture)
            axis.set_xlabel(tile.words.replace("  ", "\n"), fontsize=11)
        line[0].set_ylabel(f"slot {slot.number}", fontsize=12)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        for side in axis.spines.values():
            side.set_visible(False)
    save_figure(figure, path, 110)


def write_page(
    folder: Path,
    results: Mapping[str, Mapping[str, Result]],
    zeroshot: Mapping[str, np.ndarray],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    parameters: Mapping[str, int],
    encoder: ClipEncoder,
    data: Path,
    facts: Mapping[str, Any],
) -> Path:
    """Write `demo.html`, `demo.png` and `curves.png` to `folder`; return the page's path.

    Args:
        folder: the folder.
        results: by model, then task.
        zeroshot: predictions of `encoder` on the zero-shot test.
        curves: records of metrics.jsonl by model.
        parameters, encoder, data: parameters by model, the encoder of slots, and the data.
        facts: facts about the trainings, for the first lines.
    """
    captioned = WdsSet(data / "retrieval", "captions")
    samples = [captioned.read(i) for i in range(min(_CAPTIONS, len(captioned)))]
    slots = demo_slots(encoder, [image for _, image, _ in samples], [texts[0] for _, _, texts in samples])
    draw_slots(slots, folder / "demo.png")
    save_figure(draw_curves(curves), folder / "curves.png", 110)
    template = Path(__file__).with_name("demo.html.jinja").read_text(encoding="utf-8")
    html = Environment(autoescape=True).from_string(template).render(
        facts={**facts, "slots": encoder.slots},
        names=[{"name": n, "size": f"{parameters[n] / 1e6:.2f} M" if n in parameters else ""} for n in results],
        rows=six_rows(results),
        all=all_rows(results),
        examples=_examples(data, zeroshot),
        curves="data:image/png;base64," + base64.b64encode((folder / "curves.png").read_bytes()).decode(),
        commands=_commands(folder),
        **_pictures(slots),
    )  # fmt: skip
    return write_whole(folder / "demo.html", html)


def six_rows(results: Mapping[str, Mapping[str, Result]]) -> list[ScoreRow]:
    """Return the first six scores with their intervals."""
    rows = []
    for label, task, part in _ROWS:
        task_results = [by_task.get(task) for by_task in results.values()]
        # The text-only baseline lacks some metrics; n and chance come from the column with most metrics.
        first = max((r for r in task_results if r is not None), key=lambda r: len(r.metrics))
        rows.append(
            ScoreRow(
                label,
                first.counts.get(part, first.n),
                _chance(first, part),
                [_cell(result, part) for result in task_results],
            )
        )
    return rows


def _chance(result: Result, part: str) -> str:
    return format_metric(part, result.chance) if is_share(part) else ""


def _cell(result: Result | None, part: str) -> dict[str, str]:
    if result is None or part not in result.metrics:
        return {"value": "–", "interval": ""}
    value = result.metrics[part]
    low, high = result.intervals.get(part) or wilson(value, result.n)
    return {
        "value": format_metric(part, value),
        "interval": f"{format_metric(part, low)} to {format_metric(part, high)}",
    }


def all_rows(results: Mapping[str, Mapping[str, Result]]) -> list[dict[str, Any]]:
    """Return every metric of every task."""
    tasks = dict.fromkeys(task for by_task in results.values() for task in by_task)
    rows = []
    for task in tasks:
        task_results = [by_task.get(task) for by_task in results.values()]
        parts = dict.fromkeys(part for result in task_results if result for part in result.metrics)
        for part in parts:
            cells = [format_metric(part, r.metrics[part]) if r and part in r.metrics else "–" for r in task_results]
            rows.append({"task": task, "part": part, "cells": cells})
    return rows


def draw_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw loss and batch accuracy over samples."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, key, title in zip(
        axes, ("loss", "accuracy"), ("contrastive loss", "accuracy inside the batch"), strict=True
    ):
        for name, records in curves.items():
            axis.plot([r["samples"] for r in records], [r[key] for r in records], label=name)
        axis.set(title=title, xlabel="samples seen")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def _examples(data: Path, predictions: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    images = WdsSet(data / "zeroshot", "label")
    classes = images.classnames()
    examples = []
    # Steps of seven classes, because every third class has the same shape.
    for number in [i * 7 * len(images) // len(classes) % len(images) for i in range(_EXAMPLES)]:
        _, image, label = images.read(number)
        guess = int(predictions["predicted"][number][0])
        picture = _uri(image.resize((160, 160), Image.Resampling.BICUBIC))
        examples.append(
            {"truth": classes[label], "predicted": classes[guess], "right": guess == label, "picture": picture}
        )
    return examples


def _pictures(demo: DemoSlots) -> dict[str, Any]:
    slots = [
        {
            "number": slot.number,
            "words": slot.words,
            "tiles": [
                {"picture": _uri(tile.picture), "words": tile.words, "caption": caption}
                for tile, (_, caption) in zip(slot.tiles, demo.images, strict=True)
            ],
        }
        for slot in demo.slots
    ]
    return {"slots": slots, "pictures": [{"picture": _uri(p), "caption": c} for p, c in demo.images]}


def _commands(folder: Path) -> dict[str, str]:
    run = shlex.quote(str(folder / "clip_sparo"))
    own = [f"sparo eval {run}", f"sparo slots show {run} --task retrieval --out slots", f"sparo export {run}"]
    mine = [
        "sparo data convert photos.csv data/mine --test 200",
        "sparo data check data/mine/train",
        "sparo train own_pairs",
    ]
    return {"own": "\n".join(own), "data": "\n".join(mine)}


def _uri(image: Image.Image) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(image.convert("RGB"))).decode()
