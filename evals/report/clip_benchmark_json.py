"""Results in the JSON files that clip-benchmark writes, so that `clip_benchmark build` merges them with its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.files import write_whole

from ..tasks.result import Result
from .results_file import Record

_TASKS = {
    "zeroshot": "zeroshot_classification",
    "retrieval": "zeroshot_retrieval",
    "probe": "linear_probe",
    "pairs": "image_caption_selection",
}


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """One file per record and data set (SugarCrepe: per split), named as clip-benchmark names its own; k-NN and DINO's probe
    have no counterpart there and are left out."""
    written = []
    for record in records:
        for dataset, metrics in _parts(record):
            task = _TASKS[record.result.task]
            # A path has slashes, and a file's name has none.
            pretrained = re.sub(r"[^\w.-]+", "_", record.checkpoint).strip("_")
            content: dict[str, Any] = {
                "dataset": dataset, "model": "sparo", "pretrained": record.checkpoint, "task": task,
                "metrics": metrics, "language": "en",
            }  # fmt: skip
            name = f"{dataset.replace('/', '-')}_{pretrained}_sparo_en_{task}.json"
            written.append(write_whole(folder / name, json.dumps(content)))
    return written


def _parts(record: Record) -> list[tuple[str, dict[str, float]]]:
    result, name = record.result, record.task.removesuffix(":probe")
    if result.task == "zeroshot":
        if "mean_average_precision" in result.metrics:
            return [(name, dict(result.metrics))]
        # clip-benchmark writes acc5 always, and NaN where there are fewer classes; its table asks for the column.
        return [(name, {"acc5": float("nan"), **result.metrics})]
    if result.task == "retrieval":
        return [(name, _retrieval(result))]
    if result.task == "probe":
        metrics = {f"lp_{k}": v for k, v in {"acc5": float("nan"), **result.metrics}.items()}
        return [(name, {**metrics, **{k: result.options[k] for k in ("weight_decay", "epochs", "seed", "fewshot_k")}})]
    if result.task == "pairs":
        # One file for each split, as clip-benchmark scores SugarCrepe's as sets of their own.
        kinds = [k for k in result.metrics if k not in ("macro", "micro", "order_only")]
        return [
            (f"{name}/{k}", {"image_acc": 1.0, "text_acc": result.metrics[k], "acc": result.metrics[k]}) for k in kinds
        ]
    return []


def _retrieval(result: Result) -> dict[str, float]:
    names = {"image_R@": "image_retrieval_recall@", "text_R@": "text_retrieval_recall@"}
    return {
        theirs + key.removeprefix(ours): value
        for ours, theirs in names.items()
        for key, value in result.metrics.items()
        if key.startswith(ours)
    }
