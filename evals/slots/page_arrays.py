"""Arrays from which scores of any selection of units can be computed without the model, for the explorer's page.

For pairs, the margins of every unit; for other tasks, the encodings of both sides by unit. From these a page computes
what `sparo eval --slots` prints: the selected units of an image, normalised as a whole if norms matter, against whole
texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparo_train.core.errors import ConfigError, DataError

from ..feature_store.features import FeatureStore
from ..sets.base import EvalSet
from ..sets.open_set import open_labelled, open_set
from ..sets.task_config import LabelledTaskConfig, TaskConfig
from ..suite.image_text_tasks import PairsTaskConfig, RetrievalTaskConfig
from ..suite.question_tasks import QuestionsTaskConfig, choose_form
from ..suite.zeroshot_tasks import ZeroshotTaskConfig
from .eval_inputs import Classes, Pairs, Questions, encode_set, material, open_images
from .probe_tasks import Neighbours
from .units import Units, get_text_tower

LIMIT = 500  # default number of a task's images on a page; pairs are small and sent completely


class Arrays(NamedTuple):
    """Data of one task for a page.

    Attributes:
        kind: zeroshot, pairs, retrieval or knn.
        metric: name of the score in `sparo eval`.
        n: number of questions.
        of: number of images in the set.
        data: identities of the data (SHA-256), as shown and whole.
        arrays: little-endian fp32 and int32, C order, see `arrays_of`.
        facts: small values that belong to them.
    """

    kind: str
    metric: str
    n: int
    images: int
    of: int
    data: tuple[str, ...]
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def limit_task(task: TaskConfig, count: int | None) -> TaskConfig:
    """Limit a task to the number of images for a page. An explicit number is the task's own `limit`, like `sparo eval --limit`."""
    if count is None:
        sizes = [len(s) for s in (open_labelled(task) if isinstance(task, LabelledTaskConfig) else [open_images(task)])]
        if isinstance(task, PairsTaskConfig | QuestionsTaskConfig) or max(sizes) <= LIMIT:
            return task
    return task.model_copy(update={"limit": count or LIMIT})


def make_arrays(
    name: str, task: TaskConfig, units: Units, store: FeatureStore, classifier_slots: str = "slice"
) -> Arrays:
    """Return a task's arrays.

    `zeroshot`: `left` (U, n, d) images, `right` (U, C, d) classes, `labels` (n,).
    `pairs`: `left` (U, n) margins, `kinds` (n,); facts: names of kinds, macro or micro.
    `questions`: `left` (U, n * K) margins of K comparisons, `kinds` (n,), `tie` (n * K,); facts as for pairs, and K.
    `retrieval`: `left` (U, I, d), `right` (U, T, d), `owner` (T,) each text's image; facts: k of the headline.
    `knn`: `left` (U, n, d) test, `right` (U, m, d) bank, `labels` (n,), `bank_labels` (m,); facts: k, temperature,
    classes.

    Raises:
        ConfigError: a task of another kind, or one that needs texts the encoder does not have.
        DataError: data are missing or cannot be read.
    """
    if isinstance(task, RetrievalTaskConfig):
        return _retrieval(task, units, store)
    task_material = material(name, task, units, store, classifier_slots)
    sources = open_labelled(task) if isinstance(task, LabelledTaskConfig) else (open_images(task),)
    set_facts = _set_facts(sources)
    if isinstance(task_material, Pairs | Questions):
        return _make_margins(task, task_material, set_facts)
    if isinstance(task_material, Classes):
        images = torch.cat(list(task_material.blocks()))
        arrays = {
            "left": _unit_first(images),
            "right": _unit_first(task_material.weights),
            "labels": _int32(task_material.labels),
        }
        # Other metrics are not computed on a page.
        recall = isinstance(task, ZeroshotTaskConfig) and task.headline == "mean_per_class_recall"
        metric = "mean_per_class_recall" if recall else "acc1"
        return Arrays(
            "zeroshot", metric, len(images), arrays=arrays, facts={"classes": len(task_material.weights)}, **set_facts
        )
    if isinstance(task_material, Neighbours):
        return _knn(task_material, set_facts)
    raise ConfigError(
        f"{name}: the page cannot score tasks of kind {task.task}. Name tasks of kind zeroshot, pairs, choice, "
        "matching, paraphrases, retrieval or knn."
    )


def _make_margins(task: TaskConfig, each: Pairs | Questions, set_facts: Mapping[str, Any]) -> Arrays:
    """Return margins instead of encodings: two captions are one value per unit, so a page stays small."""
    margins = each.margins()
    names = [pair.kind for pair in each.caption_pairs] if isinstance(each, Pairs) else each.kinds
    kinds = list(dict.fromkeys(names))
    arrays = {"kinds": np.array([kinds.index(name) for name in names], np.int32)}
    facts: dict[str, Any] = {"kinds": kinds, "average": each.average}
    if isinstance(each, Pairs):
        arrays["left"] = _fp32(margins.values[..., 0].T)
        return Arrays("pairs", each.average, margins.questions, arrays=arrays, facts=facts, **set_facts)
    arrays["left"] = _fp32(margins.values.transpose(0, 1).flatten(1))
    arrays["tie"] = _int32(margins.tie.flatten())
    facts["comparisons"] = margins.values.shape[2]
    headline = next(iter(choose_form(each.task, each.questions[0]).comparisons))
    return Arrays("questions", headline, margins.questions, arrays=arrays, facts=facts, **set_facts)


def _knn(neighbours: Neighbours, set_facts: Mapping[str, Any]) -> Arrays:
    _, k = neighbours.config.usable_k(len(neighbours.bank))
    number = neighbours.units.number
    left, right = (f.in_memory().flatten(1).unflatten(-1, (number, -1)) for f in (neighbours.test, neighbours.bank))
    arrays = {
        "left": _unit_first(left), "right": _unit_first(right), "labels": _int32(neighbours.labels), "bank_labels": _int32(neighbours.bank_labels),
    }  # fmt: skip
    classes = 1 + int(torch.cat([neighbours.bank_labels, neighbours.labels]).max())
    if neighbours.groups is not None:
        arrays |= dict(zip(("groups", "bank_groups"), map(_int32, neighbours.groups), strict=True))
    config = neighbours.config
    facts = {"k": k, "temperature": config.temperature, "classes": classes, "balanced": config.balanced}
    return Arrays("knn", f"acc1_k{k}", len(left), arrays=arrays, facts=facts, **set_facts)


def _retrieval(task: RetrievalTaskConfig, units: Units, store: FeatureStore) -> Arrays:
    source, tower = open_set(task, "captions"), get_text_tower(units)
    features = encode_set(source, units, store, task.workers)
    lines = [line for captions in features.facts for line in captions]
    owner = torch.tensor([i for i, found in enumerate(features.facts) for _ in found], dtype=torch.int64)
    if not lines:
        raise DataError(f"{source.root}: no image has a caption")
    both = [k for k in task.k if k <= min(len(features), len(lines))]
    if not both:
        raise ConfigError(f"k={list(task.k)}: exceeds the {len(features)} images or the {len(lines)} captions of {source.root}. Use a smaller k.")  # fmt: skip
    k = 5 if 5 in both else max(both)
    left, right = units.images(features.in_memory()), units.texts(store.texts(tower, lines))
    arrays = {"left": _unit_first(left), "right": _unit_first(right), "owner": _int32(owner)}
    # Images without a caption are candidates for other texts, but no queries.
    num_queries = len(owner.unique())
    return Arrays("retrieval", f"mean_R@{k}", num_queries, arrays=arrays, facts={"k": k}, **_set_facts((source,)))


def _set_facts(sources: Sequence[EvalSet]) -> dict[str, Any]:
    """Return size and identities of a task's sets (the last one is scored), as shown and whole."""
    # Both identities, so that a selection on a part is recognized on the whole set.
    whole = [source if source.part_of is None else source.part_of for source in sources]
    names = (" ".join(source.identity() for source in some) for some in (sources, whole))
    return {"images": len(sources[-1]), "of": len(whole[-1]), "data": tuple(dict.fromkeys(names))}


def _unit_first(rows: Tensor) -> np.ndarray:
    """Rearrange (n, U, d) to (U, n, d)."""
    return _fp32(rows.transpose(0, 1))


def _fp32(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.float().numpy(), dtype="<f4")


def _int32(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), dtype="<i4")
