"""Tasks of models with a text tower: what has to be encoded for them, and which function of features scores it."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from sparo_train.core.errors import DataError

from ..sets.base import Limited, Pair
from ..sets.captions import SugarCrepeSet
from ..sets.opening import open_set
from ..sets.task_config import SetTaskConfig
from ..tasks import pairs, retrieval, zeroshot
from ..tasks.result import Result
from .scoring import Scoring, described, labels_of
from .task import Task


class ZeroshotTaskConfig(SetTaskConfig):
    """Classification by prompts; multilabel sets (`.npy` members) get mean average precision.

    `classes`: how many there must be.  `border_crop`: of ObjectNet, its red border of two pixels (wise-ft crops it,
    clip-benchmark does not).  `headline`: DataComp has mean_per_class_recall for some sets, the SPARO paper says accuracy.
    """

    task: Literal["zeroshot"] = "zeroshot"
    classes: int | None = Field(default=None, gt=1)
    border_crop: bool = True
    headline: Literal["acc1", "mean_per_class_recall"] = "acc1"


class RetrievalTaskConfig(SetTaskConfig):
    """Images to captions and back.  `annotations`: for layout karpathy, the file that says which captions an image has."""

    task: Literal["retrieval"] = "retrieval"
    annotations: str | None = None
    k: tuple[int, ...] = Field(default=(1, 5, 10), min_length=1)


class PairsTaskConfig(SetTaskConfig):
    """True against false captions; ties lose.  `average`: the headline over kinds (Table B.1 has macro, SugarCrepe's authors micro)."""

    task: Literal["pairs"] = "pairs"
    average: Literal["macro", "micro"] = "macro"


def run_zeroshot(scoring: Scoring, task: ZeroshotTaskConfig) -> Result:
    """Accuracy over the set's class names with its templates, or mean average precision of a multilabel set."""
    source = open_set(task, "label")
    names, templates = source.classnames(), source.templates()
    if task.classes not in (None, len(names)):
        raise DataError(f"{source.root}: has {len(names)} class names, {task.classes} expected")
    (images,) = scoring.features([source], task.workers)

    def score() -> Result:
        weights = zeroshot.classifier(scoring.texts(zeroshot.prompts(names, templates)), len(names))
        if source.kind == "labels":
            table = torch.tensor(images.facts)
            if table.shape[1] != len(names):
                raise DataError(
                    f"{source.root}: rows of {table.shape[1]} labels, and there are {len(names)} class names"
                )
            return zeroshot.score_multilabel(images.blocks(), weights, table)
        found = zeroshot.score(images.blocks(), weights, labels_of(images, source, len(names)))
        return found._replace(headline=task.headline)

    options = {"templates": len(templates), "template_mean": "slots not normalised again", "ties": "lower class"}
    if task.layout == "objectnet":
        options["border_crop"] = task.border_crop
    return described(scoring.ranks.first(score), images, source, options)


def run_retrieval(scoring: Scoring, task: RetrievalTaskConfig) -> Result:
    """R@k in both directions over the set's captions."""
    source = open_set(task, "captions")
    (images,) = scoring.features([source], task.workers)
    owner = torch.tensor([i for i, lines in enumerate(images.facts) for _ in lines], dtype=torch.int64)
    texts = [line for lines in images.facts for line in lines]
    if not texts:
        raise DataError(f"{source.root}: not one image has a caption")
    found = scoring.ranks.first(lambda: retrieval.score(images.in_memory(), scoring.texts(texts), owner, task.k))
    return described(found, images, source, {})


def run_pairs(scoring: Scoring, task: PairsTaskConfig) -> Result:
    """Accuracy of true against false captions."""
    source = open_set(task, "pairs")
    (images,) = scoring.features([source], task.workers)
    found: list[Pair] = [pair for row in images.facts for pair in row]
    owner = torch.tensor([i for i, row in enumerate(images.facts) for _ in row])

    def score() -> Result:
        both = scoring.texts([p.caption for p in found] + [p.negative_caption for p in found])
        true, false = both.split(len(found))
        texts = [(p.caption, p.negative_caption) for p in found]
        return pairs.score(images.rows(owner), true, false, [p.kind for p in found], task.average, texts)

    whole = source.whole if isinstance(source, Limited) else source
    options = {"data": whole.version} if isinstance(whole, SugarCrepeSet) else {}
    keys = [f"{images.keys[i]} {p.kind} {p.key}".strip() for i, p in zip(owner.tolist(), found, strict=True)]
    return described(scoring.ranks.first(score), images, source, options, keys)


def _check_zeroshot(task: ZeroshotTaskConfig) -> None:
    source = open_set(task, "label")
    source.check()
    source.classnames()


ZEROSHOT = Task(ZeroshotTaskConfig, run_zeroshot, _check_zeroshot, needs=("texts",))
RETRIEVAL = Task(RetrievalTaskConfig, run_retrieval, lambda task: open_set(task, "captions").check(), needs=("texts",))
PAIRS = Task(PairsTaskConfig, run_pairs, lambda task: open_set(task, "pairs").check(), needs=("texts",))
