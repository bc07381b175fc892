"""Search by slots compared with search by whole encodings, on rendered scenes whose attributes are known.

    python benchmarks/slot_search.py RUN... [--json FILE]

RUN is a run of the demo's recipe (`sparo demo` writes runs/demo/clip_sparo; other seeds: `sparo train RUN/config.yaml seed=1
name=s1`). Slots are named on the caption pairs of the demo. For every slot with a name, the queries are the images of the
retrieval test whose caption contains the name, and a result is right if its caption contains it, too. `overlap` is the
Jaccard index of the other colours of query and result: the lower it is, the more they differ in other respects. Precision and
overlap are means over queries, then over slots. The script also measures how well the slot that the explorer finds for a
colour separates images whose caption contains this colour.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import common  # noqa: F401  so that `evals` is the package, not benchmarks/evals.py
import numpy as np
import torch
from torch import Tensor

from evals.encoders.loading import load_encoder
from evals.sets.wds import WdsSet
from evals.slots.attend import preprocess_image
from evals.slots.naming import contain_names, name_slots, roc_auc
from evals.slots.slot_search import DIFFERENT, rank_for_text, search_slots
from evals.slots.units import Units, get_text_tower, make_units
from sparo_train.train.run_config import load_run

COLOURS = ("red", "blue", "green", "yellow", "purple", "cyan", "brown", "gray")
K = 10
FORMS = ("whole encoding", "slot", f"slot, others different ({DIFFERENT})")


def encoded(units: Units, source: WdsSet) -> tuple[Tensor, list[list[str]]]:
    rows, captions = [], []
    for begin in range(0, len(source), 64):
        samples = [source.read(i) for i in range(begin, min(begin + 64, len(source)))]
        with torch.inference_mode():
            pixels = units.encoder.stack([preprocess_image(units.encoder, image) for _, image, _ in samples])
            rows.append(units.encoder.encode(pixels).flatten(1))
        captions += [[p.caption for p in fact] if source.kind == "pairs" else list(fact) for _, _, fact in samples]
    return units.images(torch.cat(rows)), captions


def measured(run: Path) -> dict[str, tuple[float, float]]:
    """Return precision at 10 and overlap of other colours for each kind of search."""
    units = make_units(load_encoder(run))
    tasks = load_run(run / "config.yaml", []).eval.tasks
    images, captions = encoded(units, WdsSet(Path(tasks["pairs"].root), "pairs"))
    texts = units.texts(get_text_tower(units).text(list(COLOURS)))
    naming = name_slots(images, texts, COLOURS, contain_names(captions, COLOURS), 1, 10, 0)
    images, captions = encoded(units, WdsSet(Path(tasks["retrieval"].root), "captions"))
    has = contain_names(captions, COLOURS)
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in (*FORMS, "chance")}
    for one in naming.slots:
        if not one.passing:
            continue
        column = COLOURS.index(one.passing[0])
        others = np.delete(has, column, axis=1)
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in FORMS}
        for query in has[:, column].nonzero()[0].tolist():
            for name, slots, weight in zip(
                FORMS, (range(units.number), [one.slot], [one.slot]), (0, 0, DIFFERENT), strict=True
            ):
                hits = [match.image for match in search_slots([images], images[query], list(slots), weight, K, query)]
                shared, union = (others[hits] & others[query]).sum(1), (others[hits] | others[query]).sum(1)
                rows[name].append((has[hits, column].mean(), (shared / np.maximum(union, 1)).mean()))
        for name, values in rows.items():
            scores[name].append(tuple(np.mean(values, axis=0)))
        scores["chance"].append((has[:, column].mean(), float("nan")))
    queries, nothing = texts, units.texts(get_text_tower(units).text([""]))[0]
    for name, base in (("text", torch.zeros_like(nothing)), ("text minus empty text", nothing)):
        best = [int(rank_for_text(images, query - base).parts.argmax()) for query in queries]
        aucs = [
            roc_auc((images[:, slot] @ query[slot]).numpy()[:, None], has[:, i])[0]
            for i, (slot, query) in enumerate(zip(best, queries, strict=True))
        ]
        print(
            f"{run}: slot that the explorer finds by {name}: AUC {np.mean(aucs):.3f}, mean over {len(COLOURS)} colours"
        )
    print(
        f"{run}: {len(scores['chance'])} of {units.number} slots named; AUC {naming.auc:.3f}, of other names {naming.shuffled:.3f}"
    )
    return {name: tuple(np.mean(values, axis=0).tolist()) for name, values in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {str(run): measured(run) for run in options.runs}
    for name in (*FORMS, "chance"):
        precision, overlap = np.array([scores[name] for scores in found.values()]).T
        print(
            f"{name:32} precision@{K} {precision.mean():.3f} ({precision.min():.3f}-{precision.max():.3f}), overlap {overlap.mean():.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
