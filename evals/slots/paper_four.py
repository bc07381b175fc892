"""The SPARO paper's Table 4: slots chosen by their zero-shot accuracy on one set, scored kind by kind on pairs of captions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..tasks.result import wilson
from . import selection_methods as choosing
from .eval_inputs import Classes, Pairs
from .margins import Margins, interval
from .selection_report import ChoiceOptions, Score, choose


class FourColumn(NamedTuple):
    """A checkpoint's half of Table 4: by kind, and their average last. `share`: of the slots, e.g. `50 %`; `random`: the mean of many."""

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
    """Choose on `selection_data` (all of it: the pairs are other data) and score on `pairs`."""
    selection = choose(name, selection_data, how._replace(held_out=False))
    margins, k = pairs.margins(), len(selection.chosen)
    names = list(dict.fromkeys(pair.kind for pair in pairs.caption_pairs))
    kinds = torch.tensor([names.index(pair.kind) for pair in pairs.caption_pairs])
    # Kinds as the table's rows have them, whatever average the task itself is set to.
    margins = margins._replace(kinds=kinds)

    def first(order: list[int], count: int) -> Tensor:
        return choosing.curve(margins, order)[:, count - 1]

    order = list(selection.order)
    random_scores = [
        by_kind(first(choosing.random_order(margins.units, 1000 + i), k), margins) for i in range(how.draws)
    ]
    random = [sum(values[i].value for values in random_scores) / len(random_scores) for i in range(len(names) + 1)]
    share = f"{100 * k / margins.units:.0f} %"
    return FourColumn(
        label,
        share,
        margins.questions,
        how.draws,
        [*names, "Average"],
        by_kind(first(order, margins.units), margins),
        by_kind(first(order, k), margins),
        random,
        by_kind(first(order[::-1], k), margins),
    )


def by_kind(right: Tensor, margins: Margins) -> list[Score]:
    """Accuracy of each kind, and their mean, with 95 % intervals."""
    scores = []
    for kind in range(int(margins.kinds.max()) + 1):
        here = right[margins.kinds == kind]
        scores.append(Score(float(here.double().mean()), *wilson(float(here.double().mean()), len(here))))
    return [*scores, Score(float(margins.accuracy(right)), *interval(right, margins.kinds))]
