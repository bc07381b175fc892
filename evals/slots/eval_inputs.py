"""Inputs of slot analysis: margins of each unit on a task of `eval.tasks`; images and texts are encoded once and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.registries import TASKS

from ..feature_store.feature_table import Features
from ..feature_store.features import FeatureStore
from ..sets.base import EvalSet, Pair, Transform
from ..sets.open_set import open_labelled, open_set, refuse_shared_groups, warn_of_untrained_classes
from ..sets.task_config import LabelledTaskConfig, SetTaskConfig, TaskConfig
from ..suite.image_text_tasks import PairsTaskConfig
from ..suite.labelled_tasks import KnnTaskConfig, ProbeTaskConfig, excluded_groups
from ..suite.question_tasks import ChoiceTaskConfig, QuestionsTaskConfig, load_questions
from ..suite.scoring import collect_labels, is_same_set
from ..suite.zeroshot_tasks import ZeroshotTaskConfig
from ..tasks import zeroshot
from ..tasks.clusters import assign_clusters
from .margins import Average, EachUnit, Margins, class_curves, class_margins, each_unit, pair_margins, renormalize
from .probe_tasks import Linear, Neighbours, ProbeTask
from .question_inputs import Questions
from .units import Units, get_text_tower

ClassifierSlots = str  # slice | renorm


class Classes(NamedTuple):
    """Zero-shot task: encodings of n images, class vectors (C, U, d) or (C, 1, d), labels (n,)."""

    units: Units
    features: Features
    weights: Tensor
    labels: Tensor
    data: str

    @property
    def keys(self) -> list[str]:
        return self.features.keys

    @property
    def kinds(self) -> Tensor:
        return torch.zeros(len(self.labels), dtype=torch.int64)

    def blocks(self) -> Iterator[Tensor]:
        return (self.units.images(rows) for rows in self.features.blocks(1024))

    def margins(self) -> Margins:
        return class_margins(self.blocks(), self.weights, self.labels, self.keys, self.units.rest)

    def each(self) -> EachUnit:
        return each_unit(self.blocks(), self.weights, self.labels, self.units.rest)

    def curves(self, orders: Sequence[Sequence[int]]) -> Tensor:
        """Return correct answers (O, n, U) over all classes."""
        return class_curves(self.blocks(), self.weights, self.labels, orders, self.units.rest)


class Pairs(NamedTuple):
    """Task with true and false captions; `owner` (n,) is the image of each of `caption_pairs`."""

    units: Units
    features: Features
    true: Tensor
    false: Tensor
    owner: Tensor
    caption_pairs: list[Pair]
    average: Average
    data: str

    @property
    def keys(self) -> list[str]:
        return [self.features.keys[i] for i in self.owner.tolist()]

    def margins(self) -> Margins:
        u = self.units
        image = u.images(self.features.rows(self.owner))
        kinds = [pair.kind for pair in self.caption_pairs]
        return pair_margins(image, u.texts(self.true), u.texts(self.false), kinds, self.keys, self.average, u.rest)


Material = Classes | Pairs | Questions | ProbeTask


def material(
    name: str, task: TaskConfig, units: Units, store: FeatureStore, classifier_slots: ClassifierSlots = "slice"
) -> Material:
    """Return a task's encodings by unit.

    Raises:
        ConfigError: the task's score is not a sum over units (retrieval, probes), or the encoder has no text tower for
            it.
        DataError: data are missing.
    """
    if isinstance(task, ZeroshotTaskConfig):
        return _classes(task, units, store, classifier_slots)
    if isinstance(task, PairsTaskConfig):
        return _pairs(task, units, store)
    if isinstance(task, QuestionsTaskConfig):
        return _questions(task, units, store)
    if isinstance(task, KnnTaskConfig):
        bank, test = open_labelled(task)
        return Neighbours(
            *_probe_inputs(bank, test, units, store, task.workers, units.encoder.transform_with_resize(task.resize)),
            task,
            excluded_groups(bank, test, is_same_set(bank, test)),
        )
    if isinstance(task, ProbeTaskConfig):
        bank, test = (open_set(task, "label", split) for split in (task.train_split, task.split))
        refuse_shared_groups(bank, test, "train")
        warn_of_untrained_classes(bank, test)
        return Linear(*_probe_inputs(bank, test, units, store, task.workers))
    raise ConfigError(
        f"{name}: needs a task of kind zeroshot, pairs, choice, matching, paraphrases, knn or probe, got {task.task}. Name another one."
    )


def open_images(task: TaskConfig) -> EvalSet:
    """Return the images of a task. Raises `ConfigError` if the task itself has no images."""
    if isinstance(task, LabelledTaskConfig):
        return open_labelled(task)[1]
    if isinstance(task, SetTaskConfig):
        return open_set(task, TASKS.get(task.task).facts)
    instead = {"view_masks": "`sparo slots views` draws them", "video_masks": "`sparo slots panels` draws them"}
    needs = instead.get(task.task, "name a task of images, or video_masks or view_masks for videos and scenes")
    raise ConfigError(f"task {task.task}: has no images to show; {needs}")


def identities(source: EvalSet) -> str:
    """Return a set's identity, and that of the whole set if this is part of it, by which shared images are recognized."""
    return source.identity() if source.part_of is None else f"{source.identity()} {source.part_of.identity()}"


def encode_set(source: EvalSet, units: Units, store: FeatureStore, workers: int) -> Features:
    """Return a set's encodings, stored or computed now."""
    features = store.images(units.encoder, source, workers=workers)
    assert features is not None  # None is only returned for a share
    return features


def _classes(task: ZeroshotTaskConfig, units: Units, store: FeatureStore, classifier_slots: str) -> Classes:
    if task.language is not None:
        raise ConfigError(
            f"language={task.language}: slots are scored with the set's own class names. Remove language."
        )
    source, tower = open_set(task, "label"), get_text_tower(units)
    names, templates = source.classnames(), source.templates()
    # Check labels while encoding, because an index beyond the classes has no class vector.
    source.label_below = len(names)
    features = encode_set(source, units, store, task.workers)
    if source.kind == "labels":
        raise ConfigError(
            f"{source.root}: has several labels per image, so its score is average precision, which is not a sum over "
            "units (slots, parts or heads). Use a set with one label per image."
        )
    # As in `sparo eval`, and split into units afterwards, so that units sum to the same score.
    vectors = zeroshot.classifier(store.texts(tower, zeroshot.prompts(names, templates)), len(names))
    weights = units.texts(vectors)
    if classifier_slots == "renorm":
        weights = renormalize(weights)
    return Classes(units, features, weights, collect_labels(features, source), identities(source))


def _pairs(task: PairsTaskConfig, units: Units, store: FeatureStore) -> Pairs:
    source, tower = open_set(task, "pairs"), get_text_tower(units)
    features = encode_set(source, units, store, task.workers)
    caption_pairs = [(i, pair) for i, row in enumerate(features.facts) for pair in row]
    if not caption_pairs:
        raise DataError(f"{source.root}: no image has a pair of captions")
    texts = [text for _, pair in caption_pairs for text in (pair.caption, pair.negative_caption)]
    return _as_pairs(units, features, store.text_rows(tower, texts), caption_pairs, task.average, identities(source))


def _as_pairs(
    units: Units,
    features: Features,
    texts: Callable[[Sequence[str]], Tensor],
    caption_pairs: Sequence[tuple[int, Pair]],
    average: Average,
    data: str,
) -> Pairs:
    """Return pairs of captions from (number of the image, pair)."""
    owner, pairs = torch.tensor([image for image, _ in caption_pairs]), [pair for _, pair in caption_pairs]
    true, false = (texts([getattr(pair, name) for pair in pairs]) for name in ("caption", "negative_caption"))
    return Pairs(units, features, true, false, owner, pairs, average, data)


def _questions(task: QuestionsTaskConfig, units: Units, store: FeatureStore) -> Pairs | Questions:
    """Return the questions of a task; those with a single wrong caption are pairs."""
    tower = get_text_tower(units)
    source, questions = load_questions(task)
    features = encode_set(source, units, store, task.workers)
    texts = store.text_rows(tower, [text for question in questions for text in question.texts])
    each = Questions(units, features, texts, task, questions, identities(source))
    single = all(len(question.images) == 1 and len(question.texts) == 2 for question in questions)
    if single and isinstance(task, ChoiceTaskConfig) and task.ties == "lose":
        return _as_pairs(units, features, texts, each.caption_pairs(), task.average, each.data)
    return each


def make_pairs(name: str, each: Material) -> Pairs:
    """Return pairs of captions, on which masks are trained: of questions, every right caption with each wrong one.

    Raises:
        ConfigError: a task without captions.
    """
    if isinstance(each, Questions) and (caption_pairs := each.caption_pairs()):
        return _as_pairs(each.units, each.features, each.texts, caption_pairs, each.average, each.data)
    if not isinstance(each, Pairs):
        raise ConfigError(
            f"--task {name}: masks of slots are trained on pairs of a right and a wrong caption, which this task "
            "does not have. Name a task of kind `pairs`, `matching` or `paraphrases`, or a task of kind `choice` "
            "that has several captions per image."
        )
    return each


def _probe_inputs(
    bank_set: EvalSet,
    test_set: EvalSet,
    units: Units,
    store: FeatureStore,
    workers: int,
    transform: Transform | None = None,
) -> tuple[Units, Features, Tensor, Features, Tensor, str]:
    if units.rest:
        raise ConfigError(
            "--units heads: heads cannot be selected on tasks of kind knn or probe. Name a task of kind zeroshot, pairs, "
            "choice, matching or paraphrases."
        )
    bank, test = (store.images(units.encoder, s, transform, workers=workers) for s in (bank_set, test_set))
    assert bank is not None and test is not None
    labels = collect_labels(bank, bank_set), collect_labels(test, test_set)
    return units, bank, labels[0], test, labels[1], f"{identities(bank_set)} {identities(test_set)}"


def question_images(material: Material) -> list[tuple[str, ...]]:
    """Return the keys of the images of each question; copies of an image have the key of the first."""
    features = material.test if isinstance(material, ProbeTask) else material.features
    first = [features.keys[image] for image in features.first_copies]
    if isinstance(material, Questions):
        return [tuple(first[image] for image in question.images) for question in material.questions]
    if isinstance(material, Pairs):
        return [(first[image],) for image in material.owner.tolist()]
    return [(image,) for image in first]


def question_groups(material: Material) -> list[str]:
    """Return a group name per question; questions with one image, or pairs with a common true caption, share a group.

    A set may contain an image once per pair, or several images of one object.
    """
    if isinstance(material, ProbeTask | Classes):
        return [key for (key,) in question_images(material)]
    if isinstance(material, Questions):
        captions = [
            question.texts[question.answer if len(question.texts) > 1 else 0] for question in material.questions
        ]
    else:
        captions = [pair.caption for pair in material.caption_pairs]
    shown = [
        (("caption", caption), *images) for caption, images in zip(captions, question_images(material), strict=True)
    ]
    found = assign_clusters(shown)
    member = range(len(captions)) if found is None else found.tolist()
    # The smallest caption, so that a group's name does not depend on the order of its questions.
    name: dict[int, str] = {}
    for cluster, caption in zip(member, captions, strict=True):
        name[cluster] = min(caption, name.get(cluster, caption))
    return [name[cluster] for cluster in member]


def halves(name: str, material: Material, seed: int) -> Tensor:
    """Return (n,) bool: about half of the groups, selected by a hash of their names, so that the other half is held out.

    Raises:
        DataError: so few images that one half would be empty.
    """
    keys = question_groups(material)
    # By name, so that a question stays in its half whatever else the set contains.
    in_half = torch.tensor(
        [hashlib.sha256(f"{seed} {key}".encode()).digest()[0] < 128 for key in keys], dtype=torch.bool
    )
    if not bool(in_half.any()) or bool(in_half.all()):
        raise DataError(
            f"{name}: has {len(set(keys))} different image(s), too few to be split into two halves. Give more images, or use --same-data."
        )
    return in_half
