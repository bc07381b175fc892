"""The demo's page: an explanation of slots, slots with their attention, scores, examples, and next commands."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from evals.encoders.clip_encoder import ClipEncoder
from evals.sets.wds import WdsSet
from evals.slots.overlay import resize_for_page
from evals.tasks.result import Result, format_metric, is_share, wilson
from sparo_train.core.files import write_whole

from .demo_slots import COSINE, MIN_PASSING, SHARE, demo_slots, draw_slots
from .html import data_uri, render
from .results_table import ScoreCell, ScoreRow

_EXAMPLES, _CAPTIONS = 4, 200  # right and wrong answers each; images that are searched for slots
_SERIES = {"#a04000": "var(--other)", "#0b5394": "var(--accent)"}  # colours of the two models
# label, task, part
_ROWS = (
    ("Zero-shot, 24 colour-shape classes", "zeroshot", "acc1"),
    ("Zero-shot, colour-shape pairs absent from training", "heldout", "acc1"),
    ("Image to its caption, R@5", "retrieval", "text_R@5"),
    ("Caption to its image, R@5", "retrieval", "image_R@5"),
    ("Caption pairs, all kinds", "pairs", "macro"),
    ("Caption pairs, same words in another order", "pairs", "order_only"),
)


def write_page(
    folder: Path,
    results: Mapping[str, Mapping[str, Result]],
    text_only: Result,
    zeroshot: Mapping[str, np.ndarray],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    encoder: ClipEncoder,
    data: Path,
    facts: Mapping[str, Any],
) -> Path:
    """Write `demo.html` and `demo.png` to `folder`; return the page's path.

    Args:
        folder: the folder.
        results: by model, then task.
        text_only: the score of captions without images.
        zeroshot: predictions of `encoder` on the zero-shot test.
        curves: records of metrics.jsonl by model.
        encoder, data: the encoder with slots, and the folder of its data.
        facts: facts about the trainings; `sizes` are the models' sizes as text.
    """
    captioned = WdsSet(data / "retrieval", "captions")
    samples = [captioned.read(i) for i in range(min(_CAPTIONS, len(captioned)))]
    slots = demo_slots(encoder, [image for _, image, _ in samples], [texts[0] for _, _, texts in samples])
    draw_slots(slots, folder / "demo.png")
    html = render(
        "demo.html.jinja",
        facts={**facts, "slots": encoder.slots, "cosine": COSINE, "share": SHARE, "min_passing": MIN_PASSING},
        demo=slots,
        uri=data_uri,
        names=list(results),
        rows=six_rows(results),
        all=all_rows(results),
        text_only=text_only_note(text_only),
        answers=_answers(data, zeroshot),
        curves=Markup(_svg(draw_curves(curves))),
        commands=_commands(folder),
    )
    return write_whole(folder / "demo.html", html)


def six_rows(results: Mapping[str, Mapping[str, Result]]) -> list[ScoreRow]:
    """Return the first six scores with their intervals."""
    rows = []
    for label, task, part in _ROWS:
        task_results = [by_task[task] for by_task in results.values()]
        first = task_results[0]
        chance = first.chance if is_share(part) else None
        n = first.counts.get(part, first.n)
        rows.append(ScoreRow(label, n, chance, [_cell(result, part) for result in task_results]))
    return rows


def _cell(result: Result, part: str) -> ScoreCell:
    value = result.metrics[part]
    low, high = result.intervals.get(part) or wilson(value, result.n)
    return ScoreCell(part, value, low, high)


def text_only_note(result: Result) -> str:
    """Return a sentence on the score of captions without images."""
    cell = _cell(result, "macro")
    return (
        f"Baseline without images: a model that sees only the two captions of a pair, the best of three, reaches {cell.text} "
        f"({cell.interval}) on caption pairs of all kinds."
    )


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
        axes, ("loss", "accuracy"), ("Contrastive loss", "Accuracy within the batch"), strict=True
    ):
        for (name, records), colour in zip(curves.items(), _SERIES, strict=False):
            axis.plot([r["samples"] for r in records], [r[key] for r in records], label=name, color=colour)
        axis.set(title=title, xlabel="samples")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def _svg(figure: Figure) -> str:
    """Return a figure as SVG in the page's colours, so that it fits light and dark pages; close it."""
    out = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparo"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    svg = out.getvalue()
    for colour, variable in {"#000000": "currentColor", **_SERIES}.items():
        svg = svg.replace(colour, variable)
    return svg[svg.index("<svg") :]


def _answers(data: Path, predictions: Mapping[str, np.ndarray]) -> list[list[dict[str, Any]]]:
    """Return right answers and wrong ones, evenly spaced over the images of each kind."""
    images = WdsSet(data / "zeroshot", "label")
    classes = images.classnames()
    guesses = predictions["predicted"][:, 0]
    labels = np.asarray([images.read(i)[2] for i in range(len(images))])
    answers: list[list[dict[str, Any]]] = []
    for right in (True, False):
        numbers = np.flatnonzero((guesses == labels) == right)
        some = numbers[np.unique(np.linspace(0, len(numbers) - 1, _EXAMPLES).astype(int))] if len(numbers) else numbers
        answers.append([])
        for number in some.tolist():
            picture = data_uri(resize_for_page(images.read(number)[1].convert("RGB"), (160, 160)))
            names = {"truth": classes[labels[number]], "predicted": classes[guesses[number]]}
            answers[-1].append({**names, "right": right, "picture": picture})
    return answers


def _commands(folder: Path) -> dict[str, str]:
    run = shlex.quote(str(folder / "clip_sparo"))
    own = [f"sparo eval {run}", f"sparo slots show {run} --task retrieval --out slots", f"sparo export {run}"]
    mine = [
        "sparo data convert photos.csv data/mine --test 200",
        "sparo data check data/mine/train",
        "sparo train own_pairs",
    ]
    explore = f"sparo slots explore {run} --task retrieval"
    return {"explore": explore, "own": "\n".join(own), "data": "\n".join(mine)}
