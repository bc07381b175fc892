"""From an encoder and a task's config to a result: what has to be encoded, and which function of features scores it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.train.eval_config import (
    KnnTaskConfig,
    PairsTaskConfig,
    ProbeTaskConfig,
    RetrievalTaskConfig,
    ZeroshotTaskConfig,
)

from .feature_table import Features
from .linear import run_linear
from .results import Result
from .scoring import Scoring, labels_of
from .sets.base import EvalSet, Limited, Pair
from .sets.captions import SugarCrepeSet
from .sets.opening import open_labelled, open_set
from .tasks import knn, pairs, probe, retrieval, zeroshot


def run_zeroshot(scoring: Scoring, task: ZeroshotTaskConfig) -> Result:
    """Accuracy over the set's class names with its templates, or mean average precision of a multilabel set."""
    scoring.with_texts()
    source = open_set(task, task.task)
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
    return _told(scoring.ranks.first(score), images, source, options)


def run_retrieval(scoring: Scoring, task: RetrievalTaskConfig) -> Result:
    """R@k in both directions over the set's captions."""
    scoring.with_texts()
    source = open_set(task, task.task)
    (images,) = scoring.features([source], task.workers)
    owner = torch.tensor([i for i, lines in enumerate(images.facts) for _ in lines], dtype=torch.int64)
    texts = [line for lines in images.facts for line in lines]
    if not texts:
        raise DataError(f"{source.root}: not one image has a caption")
    found = scoring.ranks.first(lambda: retrieval.score(images.whole(), scoring.texts(texts), owner, task.k))
    return _told(found, images, source, {})


def run_pairs(scoring: Scoring, task: PairsTaskConfig) -> Result:
    """Accuracy of true against false captions."""
    scoring.with_texts()
    source = open_set(task, task.task)
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
    return _told(scoring.ranks.first(score), images, source, options, keys)


def run_probe(scoring: Scoring, task: ProbeTaskConfig) -> Result:
    """clip-benchmark's linear probe on the encodings."""
    parts = {"train": open_set(task, task.task, task.train_split), "test": open_set(task, task.task)}
    if task.val_split is not None:
        parts["val"] = open_set(task, task.task, task.val_split)
    features = dict(zip(parts, scoring.features(list(parts.values()), task.workers), strict=True))
    labels = {name: labels_of(features[name], source, None) for name, source in parts.items()}
    classes = 1 + max(int(found.max()) for found in labels.values())
    known = {name: _labelled(features[name], labels[name], task.normalize) for name in parts}
    train, held_out = known["train"], known.get("val")
    if held_out is None and task.val_proportion > 0:
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(task.seed))
        cut = round(task.val_proportion * len(order))
        if not 0 < cut < len(order):
            raise ConfigError(f"val_proportion={task.val_proportion}: of {len(order)} images leaves one side empty")
        train, held_out = train.only(order[cut:]), train.only(order[:cut])
    how = probe.Training(task.lr, task.epochs, task.batch_size, task.seed, scoring.encoder.device)
    found = scoring.ranks.first(
        lambda: probe.score(train, known["test"], classes, how, held_out, task.fewshot_k, task.weight_decay)
    )
    held = task.val_split or task.val_proportion
    return _told(found, features["test"], parts["test"], {"normalize": task.normalize, "held_out": held})


def _labelled(features: Features, labels: torch.Tensor, normalize: bool) -> probe.Labelled:
    def rows(numbers: torch.Tensor) -> torch.Tensor:
        found = features.rows(numbers)
        return F.normalize(found, dim=-1) if normalize else found

    return probe.Labelled(rows, labels)


def run_knn(scoring: Scoring, task: KnnTaskConfig) -> Result:
    """DINO's k-NN: the training images are the bank, whose search is cut over the ranks; all return the same result."""
    encoder, ranks = scoring.encoder, scoring.ranks
    transform = encoder.resized(task.resize)
    bank_set, test_set = open_labelled(task)
    bank, test = scoring.features([bank_set, test_set], task.workers, transform)
    share, first = bank.share(ranks.rank, ranks.size)
    queries, k = test.whole().to(encoder.device), max(task.k)
    found = knn.nearest(queries, share.blocks(), k, first)
    found = knn.merge(ranks.gather(knn.Nearest(*(t.cpu() for t in found))), k)
    labels, bank_labels = labels_of(test, test_set, None), labels_of(bank, bank_set, None)
    classes = 1 + int(torch.cat([bank_labels, labels]).max())
    headline = 20 if 20 in task.k else task.k[0]
    result = knn.score(found, bank_labels, labels, classes, task.k, task.temperature, headline)
    return _told(result, test, test_set, {})


def _told(
    result: Result, images: Features, source: EvalSet, options: dict[str, Any], keys: list[str] | None = None
) -> Result:
    """A result with what only the caller knows: options, the data's identity, and the keys of its predictions."""
    return result._replace(
        options={**options, **result.options}, data=source.identity(), keys=tuple(keys or images.keys)
    )


RUNNERS: dict[str, Callable[[Scoring, Any], Result]] = {
    "zeroshot": run_zeroshot,
    "retrieval": run_retrieval,
    "pairs": run_pairs,
    "probe": run_probe,
    "knn": run_knn,
    "linear": run_linear,
}
