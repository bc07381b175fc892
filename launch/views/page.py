"""The demo's page: loss curves, attention maps of a few slots, the table; one HTML file and one picture."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from jinja2 import Environment
from matplotlib.figure import Figure
from torch import Tensor

from evals.encoders.own import ClipEncoder
from evals.sets.wds import WdsSet
from evals.tasks.result import Result, is_share, shown
from sparo_train.data.examples.text import decode_tokens

_HTML = """<!doctype html><html lang="en"><meta charset="utf-8"><title>sparo demo</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}img{max-width:100%}small{color:#666}</style>
<h1>sparo demo</h1>
<p>CLIP and CLIP+SPARO of equal size on scenes rendered here: {{ facts.steps }} steps of {{ facts.batch_size }} pairs, seed {{ facts.seed }},
{{ facts.seconds }} s in all. One seed on a toy set: it shows that things work, not which model is better.</p>
<table><tr><th>per cent, 95 % interval</th><th>n</th><th>chance</th>{% for name in results %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr><td>{{ row.label }}</td><td>{{ row.n }}</td><td>{{ row.chance }}</td>
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p><small>text only: the best of three guessers that never see the image, on the same pairs.</small></p>
<h2>Training</h2><img alt="loss curves" src="data:image/png;base64,{{ curves }}">
<h2>What slots attend to</h2><p>Rows are slots, columns are held-out images; below each image the words that the same slot of the text tower attends to.
The slots shown are those whose image and text vectors agree most, leaving out slots that look at the caption's start or end.</p>
<img alt="attention maps" src="data:image/png;base64,{{ attention }}"></html>"""


def write_page(
    folder: Path,
    results: Mapping[str, Mapping[str, Result]],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    parameters: Mapping[str, int],
    encoder: ClipEncoder,
    data: Path,
    facts: Mapping[str, Any],
) -> Path:
    """Write `demo.html` and `demo.png` into `folder`; returns the page's path."""
    samples = list(islice(WdsSet(data / "retrieval", "captions"), 200))
    images = [encoder.transform(image) for _, image, _ in samples]
    curve_figure = draw_curves(curves)
    attention_figure = draw_attention(encoder, images, [captions[0] for _, _, captions in samples])
    curve_figure.savefig(folder / "curves.png", dpi=110)
    attention_figure.savefig(folder / "demo.png", dpi=110)
    template = Environment(autoescape=True).from_string(_HTML)
    html = template.render(
        facts=facts,
        results=[f"{n} ({parameters[n] / 1e6:.2f} M)" if n in parameters else n for n in results],
        rows=table_rows(results),
        curves=_base64(folder / "curves.png"),
        attention=_base64(folder / "demo.png"),
    )
    (folder / "demo.html").write_text(html, encoding="utf-8")
    return folder / "demo.html"


def table_rows(results: Mapping[str, Mapping[str, Result]]) -> list[dict[str, Any]]:
    """One row per task's headline, plus R@1 both ways and each kind of pair."""
    tasks = dict.fromkeys(task for by_task in results.values() for task in by_task)
    rows = []
    for task in tasks:
        known = [r[task] for r in results.values() if task in r]
        first = max(known, key=lambda r: len(r.metrics))
        for metric in [first.headline, *(m for m in first.metrics if m not in (first.headline, "ties"))]:
            head = metric == first.headline
            cells = []
            for by_task in results.values():
                found = by_task.get(task)
                value = found.metrics.get(metric) if found else None
                text = "–" if value is None else shown(metric, value)
                if head and found and value is not None:
                    text += f" [{shown(metric, found.interval[0])}, {shown(metric, found.interval[1])}]"
                cells.append(text)
            label = f"{task}: {metric}" if head else f"  {metric}"
            rows.append(
                {
                    "label": label,
                    "n": first.n if head else "",
                    "chance": shown(metric, first.chance) if head and is_share(metric) else "",
                    "cells": cells,
                }
            )
    return rows


def draw_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Loss and batch accuracy over samples seen."""
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


def draw_attention(
    encoder: ClipEncoder, images: Sequence[np.ndarray], texts: Sequence[str], slots: int = 4, columns: int = 6
) -> Figure:
    """A grid: input images on top, then one row per chosen slot with its attention over image and words."""
    image = encoder.image_slots(images)
    text = encoder.text_slots(texts)
    assert image.attention is not None and text.attention is not None
    chosen = choose_slots(image.values, text.values, text.attention, encoder.tokenizer.batch(texts), slots)
    # One scale per slot: an image in which the slot finds nothing stays dark.
    brightest = image.attention[:columns, :, 1:].amax(dim=(0, 2)).tolist()
    grid = round((image.attention.shape[-1] - 1) ** 0.5)
    figure, axes = plt.subplots(
        len(chosen) + 1, columns, figsize=(1.75 * columns, 2.05 * (len(chosen) + 1)), layout="constrained"
    )
    for column in range(columns):
        pixels = images[column]
        axes[0, column].imshow(pixels)
        axes[0, column].set_title(_wrap(texts[column]), fontsize=6.5)
        words = decode_tokens(encoder.tokenizer(texts[column]))
        for row, slot in enumerate(chosen, start=1):
            heat = image.attention[column, slot, 1:].reshape(grid, grid)
            axis = axes[row, column]
            axis.imshow(pixels.mean(axis=2), cmap="gray", vmin=0, vmax=400)
            extent = (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)
            axis.imshow(
                heat.numpy(),
                cmap="inferno",
                alpha=0.65,
                extent=extent,
                interpolation="bilinear",
                vmin=0,
                vmax=brightest[slot],
            )
            weights = text.attention[column, slot, : len(words)]
            top = weights.topk(min(2, len(words))).indices.sort().values.tolist()
            axis.set_xlabel("  ".join(f"{words[i]} {weights[i]:.0%}" for i in top), fontsize=7)
            if column == 0:
                axis.set_ylabel(f"slot {slot}", fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


def choose_slots(image: Tensor, text: Tensor, attention: Tensor, tokens: Tensor, count: int) -> list[int]:
    """Slots (n, L, V) by mean cosine between image and text; those whose text attention peaks at start or end come last."""
    cosine = torch.nn.functional.cosine_similarity(image, text, dim=-1).mean(dim=0)
    peak = attention.argmax(dim=-1)  # (n, L)
    empty = (peak == 0) | (peak == tokens.argmax(dim=1, keepdim=True))
    return (cosine - 2 * (empty.float().mean(dim=0) > 0.5)).topk(count).indices.tolist()


def _wrap(text: str, width: int = 30) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
