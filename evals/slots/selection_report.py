"""Selection of units on one task, and scores of the selection, all, random and the worst units; Table 4 of the SPARO paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparo_train.core.errors import ConfigError

from ..encoders.selection import Selection, SelectionData
from ..tasks.clusters import assign_clusters, difference_test
from ..tasks.result import DRAWS, percentiles
from . import selection_methods as choosing
from .eval_inputs import Classes, Material, Pairs, Questions, halves, question_groups, question_images
from .margins import Margins, interval
from .probe_tasks import ProbeTask

Share = Literal["held out", "other data", "same data", "by hand"]
_PROBE_DRAWS = 5  # random orders for tasks that are learned again for every point of a curve


class Score(NamedTuple):
    """An accuracy with its 95 % interval."""

    value: float
    low: float
    high: float


class ChoiceReport(NamedTuple):
    """Scores of a selection on a task.

    Attributes:
        share: which data: the half that was held out from the selection, data of another task, or the data of the
            selection itself; unknown for selections made by hand.
        whole, chosen, bottom: scores of all units, the selection, and equally many of the worst units.
        gain: chosen minus whole, paired.
        chance_mean, chance_low, chance_high: equally many random units, over `draws` orders.
        curve: accuracy with the first 1, 2, … units of the order; `random_mean`, `random_low`, `random_high` likewise.
    """

    task: str
    n: int
    share: Share
    whole: Score
    chosen: Score
    bottom: Score
    gain: Score
    draws: int
    curve: list[float]
    random_mean: list[float]
    random_low: list[float]
    random_high: list[float]

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._asdict().items()}


class ChoiceOptions(NamedTuple):
    """Options of a selection.

    Attributes:
        method: a key of `selection_methods.METHODS`, or `random`.
        k: number of units; None: half; 0: the number that scores best where they are selected.
        held_out: select on one half of the images and report on the other.
        draws: random orders of the controls.
    """

    method: str = "top"
    k: int | None = None
    held_out: bool = True
    seed: int = 0
    draws: int = 50


def choose(
    name: str, material: Material, how: ChoiceOptions, classifier_slots: Any = "slice", head_layers: int = 4
) -> Selection:
    """Return an order of units and its first k.

    Raises:
        ConfigError: the task does not support the method, or k exceeds the number of units.
        DataError: a half without images.
    """
    units = material.units
    if how.k is not None and not 0 <= how.k <= units.number:
        raise ConfigError(f"--k {how.k}: exceeds the {units.number} {units.kind}")
    # By names and seed instead of rows, so that a report finds the other half from the file alone.
    half = halves(name, material, how.seed) if how.held_out else None
    if isinstance(material, ProbeTask):
        order, scores = _by_learning(material, how, half)
    else:
        scores = _single_unit_accuracies(material, half)
        order = _order(material, how, scores, half)
    best = 0
    if how.k == 0:
        kinds, (right,) = _right_answers(material, [order])
        kinds, right = (kinds, right) if half is None else (kinds[half], right[half])
        # The smallest of several numbers of units with equal scores, because argmax returns the first.
        best = int(choosing.comparable(_accuracies(kinds)(right)).argmax()) + 1
    k = units.number // 2 if how.k is None else how.k or best
    share = "half" if how.held_out else "all"
    return Selection(
        checkpoint=units.encoder.weights,
        label=units.encoder.label,
        units=units.kind,
        count=units.number,
        head_layers=head_layers,
        method=how.method,
        classifier_slots=classifier_slots,
        # At least one, because half of a single unit would be empty.
        chosen=tuple(order[: max(k, 1)]),
        order=tuple(order),
        scores=tuple(scores.tolist()),
        made_on=SelectionData(
            task=name, data=material.data, n=_num_questions(material, half), share=share, seed=how.seed
        ),
    )


def _num_questions(material: Material, half: Tensor | None) -> int:
    return len(question_groups(material)) if half is None else int(half.sum())


def _single_unit_accuracies(material: Classes | Pairs | Questions, half: Tensor | None) -> Tensor:
    """Return (U,) each unit's own accuracy; for classes, over all of them."""
    if not isinstance(material, Classes):
        margins = material.margins()
        return choosing.accuracies(margins if half is None else margins.select(half))
    answers = material.each().single_unit.double()
    return (answers if half is None else answers[half]).mean(0)


def _order(material: Classes | Pairs | Questions, how: ChoiceOptions, scores: Tensor, half: Tensor | None) -> list[int]:
    if how.method == "random":
        return choosing.random_order(len(scores), how.seed)
    if how.method in (
        "top",
        "bottom",
    ):  # by exact scores, because the candidates of a search would change the ranking of single slots
        order = choosing.best_first(scores)
        return order if how.method == "top" else order[::-1]
    margins = material.margins()
    return choosing.METHODS[how.method](margins if half is None else margins.select(half))


def _by_learning(material: ProbeTask, how: ChoiceOptions, half: Tensor | None) -> tuple[list[int], Tensor]:
    if how.method not in ("top", "bottom", "random"):
        raise ConfigError(
            f"--method {how.method}: is not supported for this task, because {material.why}. Use top, bottom or random."
        )
    answers = material.single_unit().double()
    scores = (answers if half is None else answers[half]).mean(0)
    order = choosing.best_first(scores)
    if how.method == "random":
        order = choosing.random_order(len(scores), how.seed)
    return order[::-1] if how.method == "bottom" else order, scores


def _right_answers(material: Material, orders: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """Return kinds (n,), and for each order the right answers (n, U) with its first 1, 2, … units."""
    if isinstance(material, ProbeTask):
        kinds = torch.zeros(len(material.test), dtype=torch.int64)
        return kinds, [material.curve(order) for order in orders]
    if isinstance(material, Classes):
        return material.kinds, list(material.curves(orders))
    margins = material.margins()
    return margins.kinds, [choosing.curve(margins, order) for order in orders]


def report(name: str, material: Material, selection: Selection, how: ChoiceOptions) -> ChoiceReport:
    """Return the effect of a selection on a task; on its own data, on the held-out half if there is one."""
    order, k, rows = list(selection.order), len(selection.chosen), None
    share: Share = "other data" if selection.made_on.data else "by hand"
    # Compare identities of parts and whole sets, because one name may share images with another.
    selection_data_ids = {word for ids in (selection.made_on.data, *selection.looked_at) for word in ids.split()}
    if selection_data_ids & set(material.data.split()):
        share = "same data"
    # A user who selected with scores in sight saw the whole set, whatever half the file names.
    looked = any(word in told.split() for told in selection.looked_at for word in material.data.split())
    if selection.made_on.data == material.data and selection.made_on.share == "half" and not looked:
        share, rows = "held out", ~halves(name, material, selection.made_on.seed)
    # The worst on this very task, because the control should be as bad as possible.
    worst = choosing.best_first(
        material.single_unit().double().mean(0)
        if isinstance(material, ProbeTask)
        else _single_unit_accuracies(material, None)
    )[::-1]
    draws = min(how.draws, _PROBE_DRAWS) if isinstance(material, ProbeTask) else how.draws
    kinds, answers = _right_answers(
        # Far from the seeds of `--method random`, which would otherwise be its own control.
        material,
        [order, worst, *(choosing.random_order(len(order), 1000 + i) for i in range(draws))],
    )
    images = question_images(material)
    if rows is not None:
        kinds, answers = kinds[rows], [right[rows] for right in answers]
        images = [images[i] for i in rows.nonzero().flatten().tolist()]
    ours, bottom, *random_answers = answers
    clusters = assign_clusters(images)
    accuracy = _accuracies(kinds)
    random = torch.stack([accuracy(right) for right in random_answers])
    low, high = (random.quantile(q, 0) for q in (0.025, 0.975))
    return ChoiceReport(
        name,
        len(ours),
        share,
        _score(ours[:, -1], kinds, clusters),
        _score(ours[:, k - 1], kinds, clusters),
        _score(bottom[:, k - 1], kinds, clusters),
        gain(ours[:, k - 1], ours[:, -1], kinds, clusters),
        len(random_answers),
        accuracy(ours).tolist(),
        random.mean(0).tolist(),
        low.tolist(),
        high.tolist(),
    )


def _accuracies(kinds: Tensor) -> Any:
    none = torch.empty(len(kinds), 1, 1)
    return Margins(none, none[..., 0], none[..., 0] > 0, kinds, []).accuracy


def _score(right: Tensor, kinds: Tensor, clusters: np.ndarray | None) -> Score:
    return Score(float(_accuracies(kinds)(right)), *interval(right, kinds, clusters))


def gain(first: Tensor, second: Tensor, kinds: Tensor, clusters: np.ndarray | None = None) -> Score:
    """Return the accuracy of the first answers minus that of the second, with a paired bootstrap over questions within each kind.

    With clusters (n,) of questions that share images, the interval is that of a normal distribution, by the standard error
    of sums over clusters.
    """
    if clusters is not None:
        change = first.double().numpy() - second.double().numpy()
        value = float(np.mean([change[kinds.numpy() == kind].mean() for kind in kinds.unique().tolist()]))
        return Score(value, *difference_test(change, kinds.numpy(), clusters)[0])
    rng, draws, values = np.random.default_rng(0), [], []
    for kind in kinds.unique().tolist():
        here = kinds == kind
        a, b = first[here], second[here]
        # A pair has three outcomes, so a multinomial is equivalent to resampling pairs.
        counts = np.array([int((a & ~b).sum()), int((b & ~a).sum()), int((a == b).sum())])
        values.append((counts[0] - counts[1]) / counts.sum())
        resampled_counts = rng.multinomial(counts.sum(), counts / counts.sum(), DRAWS)
        draws.append((resampled_counts[:, 0] - resampled_counts[:, 1]) / counts.sum())
    return Score(float(np.mean(values)), *percentiles(np.mean(draws, axis=0)))


def complete_selection(selection: Selection, order: Sequence[int]) -> Selection:
    """Complete a selection made by hand with the other units in their order, so that curves can be drawn."""
    rest = [unit for unit in order if unit not in selection.chosen]
    return selection.model_copy(update={"order": (*selection.chosen, *rest)})


class FourColumn(NamedTuple):
    """Part of Table 4 for one checkpoint: by kind, and the average last. `share` of the slots, e.g. `50 %`; `random` is the mean of many."""

    label: str
    share: str
    n: int
    draws: int
    kinds: list[str]
    whole: list[Score]
    chosen: list[Score]
    random: list[float]
    bottom: list[Score]


def four_column(label: str, name: str, selection_data: Classes, pairs: Pairs, how: ChoiceOptions) -> FourColumn:
    """Select on `selection_data` (all of it, because the pairs are other data) and score on `pairs`."""
    selection = choose(name, selection_data, how._replace(held_out=False))
    margins, k = pairs.margins(), len(selection.chosen)
    names = list(dict.fromkeys(pair.kind for pair in pairs.caption_pairs))
    kinds = torch.tensor([names.index(pair.kind) for pair in pairs.caption_pairs])
    # Kinds as in the table's rows, whatever average the task itself uses.
    margins = margins._replace(kinds=kinds)

    def first(order: list[int], count: int) -> Tensor:
        return choosing.curve(margins, order)[:, count - 1]

    order = list(selection.order)
    random_scores = [
        accuracy_by_kind(first(choosing.random_order(margins.units, 1000 + i), k), margins) for i in range(how.draws)
    ]
    random = [sum(values[i].value for values in random_scores) / len(random_scores) for i in range(len(names) + 1)]
    share = f"{100 * k / margins.units:.0f} %"
    return FourColumn(
        label,
        share,
        margins.questions,
        how.draws,
        [*names, "Average"],
        accuracy_by_kind(first(order, margins.units), margins),
        accuracy_by_kind(first(order, k), margins),
        random,
        accuracy_by_kind(first(order[::-1], k), margins),
    )


def accuracy_by_kind(right: Tensor, margins: Margins) -> list[Score]:
    """Return the accuracy of each kind, and their mean, with 95 % intervals."""
    scores, clusters = [], assign_clusters([[key] for key in margins.keys])
    for kind in range(int(margins.kinds.max()) + 1):
        here = margins.kinds == kind
        of_kind = None if clusters is None else clusters[here.numpy()]
        scores.append(_score(right[here], torch.zeros(int(here.sum()), dtype=torch.int64), of_kind))
    return [*scores, Score(float(margins.accuracy(right)), *interval(right, margins.kinds, clusters))]
