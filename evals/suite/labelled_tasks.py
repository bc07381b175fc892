"""Tasks of any image encoder on labelled images: clip-benchmark's linear probe and DINO's k-NN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.config import between, field
from sparo_train.core.errors import ConfigError, DataError

from ..feature_store.feature_table import Features
from ..sets.base import EvalSet
from ..sets.open_set import open_labelled, open_set, refuse_shared_groups, warn_of_untrained_classes
from ..sets.task_config import LabelledTaskConfig, SetTaskConfig
from ..tasks import knn, probe
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info, chance, collect_labels, training_details
from .task import Task


class ProbeTaskConfig(SetTaskConfig):
    """clip-benchmark's linear probe on the whole encoding: AdamW, a cosine per step, the weight decay selected on held-out data.

    With several labels per image (`columns.labels`, or `.npy` members), each class has its own sigmoid, and the score is
    mean average precision.

    The SPARO paper gives lr and epochs, but neither batch size nor held-out share.
    """

    task: Literal["probe"] = field("probe", "Kind of the task: an entry of sparo.tasks.")
    train_split: str = field("train", "Split that the probe is trained on.")
    val_split: str | None = field(
        None, "Split on which the weight decay is selected. Replaces val_proportion.", examples=["val"]
    )
    val_proportion: float = field(
        0.2, "Share of train_split held out to select the weight decay. 0: use the key weight_decay.", ge=0, lt=1
    )
    weight_decay: float = field(0.0, "Weight decay that is used if val_split is not set and val_proportion is 0.", ge=0)
    fewshot_k: int = field(-1, "Images per class. -1: all.", ge=-1)
    repeats: int = field(
        1,
        "With fewshot_k: number of times that training images are drawn at random. The score is the mean over these draws, with an interval.",
        ge=1,
    )
    lr: float = field(0.1, "Peak learning rate of AdamW.", gt=0)
    epochs: int = field(10, "Passes over the encodings.", ge=1)
    batch_size: int = field(64, "Encodings per step.", gt=0)
    normalize: bool = field(True, "Scale encodings to norm one.")
    seed: int = field(
        0,
        "Random seed for the split into training and validation images, for the order of training images, and for the initial weights.",
    )


class KnnTaskConfig(LabelledTaskConfig):
    """DINO's weighted k-NN; the headline is k = 20 if it is included. Encodings are normalised as a whole."""

    groups_may_overlap: ClassVar[bool] = True

    task: Literal["knn"] = field("knn", "Kind of the task: an entry of sparo.tasks.")
    k: Annotated[tuple[int, ...], between(1, 1 << 31)] = field(
        (10, 20, 100, 200),
        "Numbers of neighbours that vote. Numbers above the size of the training set are skipped.",
        min_length=1,
    )
    temperature: float = field(0.07, "Temperature of a vote's weight, exp(cosine / temperature).", gt=0)
    balanced: bool = field(
        False, "Divide each vote for a class by that class's number of training images, to weight all classes equally."
    )

    def usable_k(self, bank: int) -> tuple[tuple[int, ...], int]:
        """Return the `k` that a bank of this many images has neighbours for, and the one of the headline. Raises `ConfigError` if there is none."""
        ks = tuple(k for k in self.k if k <= bank)
        if not ks:
            raise ConfigError(f"k={list(self.k)}: exceeds the {bank} images of {self.train}. Use a smaller k.")
        return ks, 20 if 20 in ks else ks[0]


def run_probe(scoring: Scoring, task: ProbeTaskConfig) -> Result:
    """Run clip-benchmark's linear probe on the encodings."""
    parts = _parts(task)
    warn_of_untrained_classes(parts["train"], parts["test"])
    features = dict(zip(parts, scoring.features(list(parts.values()), task.workers), strict=True))
    labels = {name: collect_labels(features[name], source) for name, source in parts.items()}
    # Over all parts, because a class that only the test has needs a row in the layer.
    several = labels["test"].ndim == 2
    classes = labels["test"].shape[1] if several else 1 + max(int(class_ids.max()) for class_ids in labels.values())
    if several and not labels["test"].any():
        raise DataError(
            f"{task.root}: no image of split {task.split} belongs to any class, so mean average precision is not defined. Check columns.labels, "
            "or add images of the classes."
        )
    if task.fewshot_k > 0 and several:
        raise ConfigError(
            "fewshot_k: needs one label per image, but images of this set have several. Remove fewshot_k."
        )
    if task.repeats > 1 and task.fewshot_k < 1:
        raise ConfigError(f"repeats={task.repeats}: applies to few-shot probes only. Set fewshot_k, or remove repeats.")
    labelled_parts = {name: _with_labels(features[name], labels[name], task.normalize) for name in parts}
    train, held_out = labelled_parts["train"], labelled_parts.get("val")
    if held_out is None and task.val_proportion > 0:
        own, other = _held_out(task, len(train.labels), parts["train"].groups)
        train, held_out = train.select(own), train.select(other)
    how = probe.Training(task.lr, task.epochs, task.batch_size, task.seed, scoring.encoder.device)
    found = scoring.ranks.rank0_broadcast(
        lambda: probe.score(
            train,
            labelled_parts["test"],
            classes,
            how,
            held_out,
            task.fewshot_k,
            task.weight_decay,
            task.repeats,
            parts["train"].own_classnames(),
        )
    )
    if not several:
        found = found._replace(chance=chance([*labels.values()]))
    val_source = task.val_split or task.val_proportion
    options = {"normalize": task.normalize, "held_out": val_source, **training_details(parts["train"], parts["test"])}
    return attach_data_info(found, features["test"], parts["test"], options)


def _held_out(task: ProbeTaskConfig, count: int, groups: Sequence[str] | None) -> tuple[Tensor, Tensor]:
    """Divide the training images, by groups if there are any, into the numbers to train on and to select the weight decay on."""
    # By the task's seed, so that the held-out share does not depend on the model.
    random = torch.Generator().manual_seed(task.seed)
    names = None if groups is None else sorted(set(groups))
    order = torch.randperm(count if names is None else len(names), generator=random)
    cut = round(task.val_proportion * len(order))
    if not 0 < cut < len(order):
        units = "images" if names is None else "groups"
        # A single group cannot be divided at any proportion.
        advice = (
            "Set another val_proportion."
            if len(order) > 1
            else "Set val_proportion=0, and choose weight_decay yourself."
        )
        raise ConfigError(
            f"val_proportion={task.val_proportion}: splits {len(order)} {units} into a training and a validation part, "
            f"and one of them is empty. {advice}"
        )
    if groups is None or names is None:
        return order[cut:], order[:cut]
    chosen = {names[i] for i in order[:cut].tolist()}
    held_out = torch.tensor([group in chosen for group in groups])
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def _parts(task: ProbeTaskConfig) -> dict[str, EvalSet]:
    """Return the data for training, scoring, and selecting the weight decay. Raises `DataError` if classes differ."""
    parts = {"train": open_set(task, "label", task.train_split), "test": open_set(task, "label")}
    if task.val_split is not None:
        parts["val"] = open_set(task, "label", task.val_split)
    if other := [name for name, source in parts.items() if source.kind != parts["test"].kind]:
        raise DataError(
            f"{task.root}: the labels of {other[0]} and `test` differ: one split has a single label per image, the "
            "other has several. Use the same kind of labels in both."
        )
    for name, source in parts.items():
        if name != "test":
            refuse_shared_groups(source, parts["test"], name)
    own = {name: source.own_classnames() for name, source in parts.items()}
    if other := [name for name in own if own[name] != own["test"]]:
        raise DataError(
            f"{task.root}: {other[0]} and test have different class folders, so label ids do not match. Use the same class folders in both."
        )
    return parts


def _check_probe(task: ProbeTaskConfig) -> None:
    for source in _parts(task).values():  # the training split, too, which the first evaluation needs
        source.check()


def _with_labels(features: Features, labels: torch.Tensor, normalize: bool) -> probe.Labelled:
    def rows(numbers: torch.Tensor) -> torch.Tensor:
        encodings = features.rows(numbers)
        return F.normalize(encodings, dim=-1) if normalize else encodings

    return probe.Labelled(rows, labels)


def run_knn(scoring: Scoring, task: KnnTaskConfig) -> Result:
    """Run DINO's k-NN: the training images are the bank, whose search is divided over the ranks; all return the same result."""
    encoder, ranks = scoring.encoder, scoring.ranks
    transform = encoder.transform_with_resize(task.resize)
    bank_set, test_set = open_labelled(task)
    bank, test = scoring.features([bank_set, test_set], task.workers, transform)
    share, first = bank.share(ranks.rank, ranks.size)
    ks, headline = task.usable_k(len(bank))
    queries, k = test.in_memory().to(encoder.device), max(ks)
    # Queries stay in memory and the bank is streamed, because it may not fit.
    facts = training_details(bank_set, test_set, task.resize)
    # If the sets are the same, an image would vote for itself; images of one patient or slide would for each other.
    same = bool(facts.pop("scored_on_training", False))
    groups = excluded_groups(bank_set, test_set, same)
    neighbours = knn.find_nearest(queries, share.blocks(knn.choose_block(encoder.device)[1]), k, first, groups=groups)
    # Every rank searched its share of the bank; the best of all ranks are the result.
    neighbours = knn.merge(ranks.gather(knn.Nearest(*(t.cpu() for t in neighbours))), k)
    neighbours = knn.Nearest(*(t.to(encoder.device) for t in neighbours))
    refuse_no_votes(neighbours, task, len(bank))
    labels, bank_labels = collect_labels(test, test_set), collect_labels(bank, bank_set)
    # A test class without training images counts as an error, and needs no index beyond the votes.
    classes = 1 + int(torch.cat([bank_labels, labels]).max())
    result = knn.score(neighbours, bank_labels, labels, classes, ks, task.temperature, headline, task.balanced)
    result = result._replace(chance=chance([bank_labels, labels]))
    if groups is not None and torch.isin(groups[0], groups[1]).any():
        facts["left_out_neighbours"] = "the image itself" if test_set.groups is None else "images of its group"
    return attach_data_info(result, test, test_set, facts)


def refuse_no_votes(neighbours: knn.Nearest, task: KnnTaskConfig, bank: int) -> None:
    """Raise `DataError` if no training image may vote for some test images, because all of them belong to the same group."""
    without = int((neighbours.similarity[:, 0] == -torch.inf).sum())
    if without:
        raise DataError(
            f"{task.test}: {without} of {len(neighbours.row)} images have no neighbour, because all {bank} images of {task.train} belong to "
            "the same group. Add training images of other groups, or remove columns.group."
        )


def excluded_groups(bank: EvalSet, test: EvalSet, same: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return numbers of the groups of test images and of the bank's, whose members do not vote for each other; None if all vote."""
    if test.groups is not None and bank.groups is not None:
        numbers = {name: i for i, name in enumerate(dict.fromkeys([*test.groups, *bank.groups]))}
        return torch.tensor([numbers[n] for n in test.groups]), torch.tensor([numbers[n] for n in bank.groups])
    return (torch.arange(len(test)), torch.arange(len(bank))) if same else None


def check_labelled(task: LabelledTaskConfig) -> None:
    """Raise `DataError` if the images are missing."""
    open_labelled(task)


PROBE = Task(ProbeTaskConfig, run_probe, _check_probe)
KNN = Task(KnnTaskConfig, run_knn, check_labelled)
