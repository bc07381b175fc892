"""Orders of units, best first, from shares of margins; the first k of an order are a selection.

`top` is the paper's (Section 5.1): units by their own accuracy. `forward`, `backward` add and take away one at a time. `cover` is the
set cover that the paper names as future work. `bottom` and `random` are controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .margins import Margins


def accuracies(margins: Margins) -> Tensor:
    """(U,) fp64: each unit alone, without what is fixed."""
    return margins.accuracy(_single_unit_answers(margins))


def comparable(scores: Tensor) -> Tensor:
    """Accuracies, of which equal ones are equal to the last bit, whatever kinds they were summed over."""
    # Sums of thirds in another order differ in the last bit, and would turn a tie into a choice.
    return scores.round(decimals=12)


def _single_unit_answers(margins: Margins) -> Tensor:
    """(n, U) bool."""
    return margins.right(margins.values.transpose(1, 2))


def best_first(scores: Tensor) -> list[int]:
    """Highest first; of equal ones the lower number."""
    return comparable(scores).argsort(descending=True, stable=True).tolist()


def top(margins: Margins) -> list[int]:
    """By the accuracy of each unit alone."""
    return best_first(accuracies(margins))


def forward(margins: Margins) -> list[int]:
    """Starting with none, the unit that helps most is added, again and again."""
    values, total = margins.values.transpose(1, 2).contiguous(), margins.fixed
    order: list[int] = []
    while len(order) < margins.units:
        scores = comparable(margins.accuracy(margins.right(total[..., None] + values)))
        scores[order] = -1  # there already
        order.append(int(scores.argmax()))
        total = total + values[..., order[-1]]
    return order


def backward(margins: Margins) -> list[int]:
    """Starting with all, the unit that is missed least is taken away, again and again; the one taken first is the last of the order."""
    values = margins.values.transpose(1, 2).contiguous()
    total, gone = values.sum(-1) + margins.fixed, list[int]()
    # Among units that are gone already none may be chosen again.
    while len(gone) < margins.units:
        scores = comparable(margins.accuracy(margins.right(total[..., None] - values)))
        scores[gone] = -1
        # Of equal ones the higher number goes, so that the lower one stays.
        gone.append(margins.units - 1 - int(scores.flip(0).argmax()))
        total = total - values[..., gone[-1]]
    return gone[::-1]


def cover(margins: Margins) -> list[int]:
    """Greedy set cover: the unit that answers most questions which none before it has answered.

    When all that can be answered are, the same begins again with the units that are left.
    """
    answers, weight = _single_unit_answers(margins).double(), margins.weight
    left, order = list(range(margins.units)), []
    open_ = weight.clone()
    while left:
        gains = (open_ @ answers[:, left]).round(decimals=12)
        # Everything that can be answered is; without the second test a set of hopeless questions would go round for ever.
        if float(gains.max()) <= 0 and not torch.equal(open_, weight):
            open_ = weight.clone()
            continue
        order.append(left.pop(int(gains.argmax())))
        open_ = open_ * (1 - answers[:, order[-1]])
    return order


def bottom(margins: Margins) -> list[int]:
    """The other way round than `top`."""
    return top(margins)[::-1]


METHODS: dict[str, Callable[[Margins], list[int]]] = {
    "top": top,
    "forward": forward,
    "backward": backward,
    "cover": cover,
    "bottom": bottom,
}


def random_order(units: int, seed: int) -> list[int]:
    """A permutation."""
    return torch.randperm(units, generator=torch.Generator().manual_seed(seed)).tolist()


def curve(margins: Margins, order: Sequence[int]) -> Tensor:
    """Right answers (n, U) of the candidates with the first 1, 2, … U units of an order."""
    return margins.right(margins.values[:, list(order)].cumsum(1).transpose(1, 2) + margins.fixed[..., None])


def random_curves(margins: Margins, draws: int, seed: int = 0) -> Tensor:
    """(draws, U) fp64: accuracies of the first 1, 2, … U units of random orders."""
    orders = (random_order(margins.units, seed + i) for i in range(draws))
    return torch.stack([margins.accuracy(curve(margins, order)) for order in orders])
