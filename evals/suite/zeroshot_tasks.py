"""Zero-shot classification, also by groups of images (WILDS, Dollar Street, GeoDE), and of people's attributes (FairFace, UTKFace)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor

from sparo_train.core.config import field
from sparo_train.core.errors import ConfigError, DataError

from ..feature_store.feature_table import Features
from ..sets.babel_imagenet import IMAGENET_CLASSES, babel_imagenet
from ..sets.base import EvalSet, refuse_label, sha256
from ..sets.open_set import open_set
from ..sets.task_config import MetadataTaskConfig
from ..tasks import attributes, zeroshot
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info, collect_labels
from .task import Task

_ROWS = 4096  # encodings that are read at once


class ZeroshotTaskConfig(MetadataTaskConfig):
    """Classification by prompts; multilabel sets (`.npy` members without `metadata`) get mean average precision.

    wise-ft crops ObjectNet's red border, clip-benchmark does not. DataComp's score is mean_per_class_recall for some
    sets, the SPARO paper's is accuracy.
    """

    task: Literal["zeroshot"] = field("zeroshot", "Kind of the task: an entry of sparo.tasks.")
    classes: int | None = field(None, "Expected number of classes. Default: not checked.", gt=1, examples=[1000])
    border_crop: bool = field(True, "Crop ObjectNet's red border of two pixels.")
    language: str | None = field(
        None,
        "Language of Babel-ImageNet for class names and prompts of an ImageNet set. Images of classes without a name in this language are not "
        "scored.",
        examples=["de"],
    )
    group_by: str | None = field(
        None,
        "Entry of `metadata` that contains the group of an image; with layout=table, the column that contains it. "
        "The accuracy of the worst group is also reported.",
        examples=["region"],
    )
    headline: Literal["acc1", "mean_per_class_recall", "f1_macro", "acc1_worst_group", "acc5_worst_group"] = field(
        "acc1", "Metric that tables show. f1_macro: mean over classes of the F1 score."
    )

    @model_validator(mode="after")
    def _check_groups(self) -> ZeroshotTaskConfig:
        if self.headline.endswith("_worst_group") and self.group_by is None:
            raise ValueError(
                f"headline={self.headline}: needs group_by. Set group_by to the entry of `metadata` that names an "
                "image's group. With layout=table, set it to a column."
            )
        if self.language is not None and self.group_by is not None:
            raise ValueError("language: cannot be combined with group_by. Remove one of them.")
        if self.group_by is not None and self.layout == "wds" and self.group_by not in self.metadata:
            raise ValueError(
                f"group_by: expected an entry of metadata, got {self.group_by}. "
                + (
                    f"Use {' or '.join(self.metadata)}."
                    if self.metadata
                    else "Name the numbers of an image in metadata."
                )
            )
        return self


class AttributesTaskConfig(MetadataTaskConfig):
    """Race, gender and age of faces, and harmful labels, as DataComp scores FairFace and UTKFace.

    Lines of classnames.txt and of the templates begin with the attribute and a colon, as in `gender:male`. Attributes are
    race, gender, age, and toxic, whose labels 14 to 17 are other than human and whose further ones are of crime.
    """

    task: Literal["attributes"] = field("attributes", "Kind of the task: an entry of sparo.tasks.")
    metadata: tuple[str, ...] = field(
        ("age", "gender", "race", "race_binary"),
        "Names of the values in each image's `.npy` member, in order.",
        strict=False,
    )


def run_zeroshot(scoring: Scoring, task: ZeroshotTaskConfig) -> Result:
    """Compute accuracy over the set's class names with its templates, or mean average precision for a multilabel set."""
    source = open_set(task, "label" if task.group_by is None else "metadata")
    named = _resolve_prompts(source, task)
    names, templates = named.names, named.templates
    # A label without a name would be scored as the last class.
    source.label_below = len(names) if named.classes is None else IMAGENET_CLASSES
    (images,) = scoring.features([source], task.workers)
    labels, groups = _labels_and_groups(images, source, task)
    kept = None if named.classes is None else torch.isin(labels, named.classes).nonzero().flatten()
    if named.classes is not None and kept is not None:
        # The named classes are numbered in the order of their names.
        place = torch.zeros(IMAGENET_CLASSES, dtype=torch.int64).index_copy(0, named.classes, torch.arange(len(names)))
        labels = place[labels[kept]]
    keys = images.keys if kept is None else [images.keys[i] for i in kept.tolist()]

    def score() -> Result:
        blocks = images.blocks() if kept is None else map(images.rows, kept.split(_ROWS))
        weights = zeroshot.classifier(scoring.texts(zeroshot.prompts(names, templates)), len(names))
        if source.kind == "labels":
            return zeroshot.score_multilabel(blocks, weights, labels)
        result = zeroshot.score(blocks, weights, labels)
        if groups is not None:
            result = zeroshot.with_groups(result, groups)
        if task.headline == "f1_macro":
            result = zeroshot.with_macro_f1(result)
        if task.headline not in result.metrics:
            raise ConfigError(
                f"headline={task.headline}: needs at least five classes, got {len(names)}. Use another headline."
            )
        if task.headline.startswith("acc5"):
            result = result._replace(chance=5 / len(names))
        return result._replace(headline=task.headline)

    options = {
        **_prompt_options(names, templates),
        "template_mean": "slots not normalised again",
        "ties": "lower class",
    }
    if task.layout == "objectnet":
        options["border_crop"] = task.border_crop
    if task.group_by is not None:
        options["group_by"] = task.group_by
    if task.language is not None:
        options["language"] = task.language
    result = scoring.ranks.rank0_broadcast(score)
    # Lowercased and with single spaces, as CLIP's tokenizer reads them. Ties go to the lower class.
    if repeated := len(names) - len({" ".join(name.lower().split()) for name in names}):
        result = result._replace(counts={**result.counts, "classes_of_one_name": repeated})
    return attach_data_info(result, images, source, options, list(keys))


def _labels_and_groups(
    images: Features, source: EvalSet, task: ZeroshotTaskConfig
) -> tuple[Tensor, list[int | str] | None]:
    """Return the class (n,) of each image, and its group if the task has `group_by`."""
    if task.group_by is None:
        return collect_labels(images, source), None
    names = _metadata_names(task)
    for key, fact in zip(images.keys, images.facts, strict=True):
        refuse_label(source, key, fact)
        _refuse_short(source, key, fact, names)
    place = 1 + names.index(task.group_by)
    return torch.tensor([fact[0] for fact in images.facts]), [fact[place] for fact in images.facts]


def _metadata_names(task: ZeroshotTaskConfig) -> tuple[str, ...]:
    """Return the names of an image's numbers after the label: of a table, only the group is read."""
    return (str(task.group_by),) if task.layout == "table" else task.metadata


def _refuse_short(source: EvalSet, key: str, fact: Sequence[Any], metadata: Sequence[str]) -> None:
    """Raise `DataError` for an image with fewer numbers than names; DataComp's sets have further ones without a name."""
    if len(fact) - 1 < len(metadata):
        raise DataError(
            f"{source.root}: {key} has only {len(fact) - 1} numbers, but `metadata` lists {len(metadata)} names "
            f"({', '.join(metadata)}). From `metadata`, remove the names that have no number."
        )


def _check_metadata(source: EvalSet, metadata: Sequence[str]) -> None:
    key, _, fact = source.read(0)
    _refuse_short(source, key, fact, metadata)


def _prompt_options(names: Sequence[str], templates: Sequence[str]) -> dict[str, Any]:
    # Two lists with equally many prompts may differ.
    return {"templates": len(templates), "prompts": sha256(*names, *templates)[:16]}


class Prompted(NamedTuple):
    """Names and templates; `classes` (C,) are the numbers of the named classes if others have no name, otherwise None."""

    names: list[str]
    templates: list[str]
    classes: Tensor | None = None


def _resolve_prompts(source: EvalSet, task: ZeroshotTaskConfig) -> Prompted:
    """Return class names and templates. Raises `DataError` without any, or if their number differs from the task's."""
    if task.language is not None:
        numbers, names, templates = babel_imagenet(Path(task.root), task.language)
        if source.kind != "label" or len(source.classnames()) != IMAGENET_CLASSES:
            raise DataError(
                f"{source.root}: language={task.language} needs one label per image and ImageNet's "
                f"{IMAGENET_CLASSES:,} classes, got {len(source.classnames())} classes. Remove the key `language`."
            )
        return Prompted(names, templates, torch.tensor(numbers))
    names, templates = source.classnames(), source.templates()
    if task.classes not in (None, len(names)):
        raise DataError(f"{source.root}: expected {task.classes} class names, got {len(names)}")
    return Prompted(names, templates)


def _check_zeroshot(task: ZeroshotTaskConfig) -> None:
    source = open_set(task, "label" if task.group_by is None else "metadata")
    source.check()
    _resolve_prompts(source, task)
    if source.kind == "metadata":
        _check_metadata(source, _metadata_names(task))


def run_attributes(scoring: Scoring, task: AttributesTaskConfig) -> Result:
    """Classify attributes of people by prompts, and report the scores by race and gender."""
    source = open_set(task, "metadata")
    names, templates = _attribute_prompts(source)
    (images,) = scoring.features([source], task.workers)
    for key, fact in zip(images.keys, images.facts, strict=True):
        _refuse_short(source, key, fact, task.metadata)
    table = torch.tensor([fact[1 : 1 + len(task.metadata)] for fact in images.facts])
    columns = dict(zip(task.metadata, table.unbind(dim=1), strict=True))

    def score() -> Result:
        weights = {
            name: zeroshot.classifier(scoring.texts(zeroshot.prompts(names[name], templates[name])), len(names[name]))
            for name in attributes.OBJECTIVES
        }
        predicted = attributes.predict(images.blocks(), weights)
        return attributes.score(predicted, columns)

    every = [text for table in (names, templates) for texts in table.values() for text in texts]
    result = scoring.ranks.rank0_broadcast(score)
    return attach_data_info(result, images, source, {"prompts": sha256(*every)[:16], "ties": "lower class"})


def _attribute_prompts(source: EvalSet) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return class names and templates by attribute. Raises `DataError` if one has none."""
    tables: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for table, texts in zip(tables, (source.classnames(), source.templates()), strict=True):
        for text in texts:
            attribute, _, rest = text.partition(":")
            table.setdefault(attribute, []).append(rest)
        if missing := [name for name in attributes.OBJECTIVES if not table.get(name)]:
            raise DataError(
                f"{source.home or source.root}: its class names or templates lack lines for "
                f"{', '.join(missing)}, got lines for {', '.join(list(table)[:4])}. Use the files of DataComp, in which "
                f"such a line begins with `{missing[0]}:`."
            )
    return tables


def _check_attributes(task: AttributesTaskConfig) -> None:
    if missing := [name for name in attributes.COLUMNS if name not in task.metadata]:
        raise ConfigError(
            f"metadata: lacks {', '.join(missing)}, got {', '.join(task.metadata)}. List the names of all values "
            "that the `.npy` member of an image contains."
        )
    source = open_set(task, "metadata")
    source.check()
    _attribute_prompts(source)
    _check_metadata(source, task.metadata)


ZEROSHOT = Task(ZeroshotTaskConfig, run_zeroshot, _check_zeroshot, needs=("texts",))
ATTRIBUTES = Task(AttributesTaskConfig, run_attributes, _check_attributes, ("texts",), "metadata")
