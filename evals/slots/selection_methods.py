"""Orders of units, best first, from margins; the first k of an order are a selection.

`top` is the paper's (Section 5.1): units by their own accuracy. `forward`, `backward` add and remove one at a time.
`cover` is the set cover that the paper names as future work. `bottom` and `random` are controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .margins import Margins


def accuracies(margins: Margins) -> Tensor:
    """Return (U,) fp64: accuracy of each unit alone, without the fixed part."""
    return margins.accuracy(_single_unit_answers(margins))


def comparable(scores: Tensor) -> Tensor:
    """Round accuracies so that equal ones are equal to the last bit, whatever kinds they were summed over."""
    # Sums of thirds in another order differ in the last bit, which would decide ties.
    return scores.round(decimals=12)


def _single_unit_answers(margins: Margins) -> Tensor:
    """(n, U) bool."""
    return margins.right_answers(margins.values.transpose(1, 2))


def best_first(scores: Tensor) -> list[int]:
    """Return units with the highest score first, the lower number first among ties."""
    return comparable(scores).argsort(descending=True, stable=True).tolist()


def top(margins: Margins) -> list[int]:
    """Order units by their accuracy alone."""
    return best_first(accuracies(margins))


def forward(margins: Margins) -> list[int]:
    """Order units by repeatedly adding the one that helps most."""
    values, total = margins.values.transpose(1, 2).contiguous(), margins.fixed
    order: list[int] = []
    while len(order) < margins.units:
        scores = comparable(margins.accuracy(margins.right_answers(total[..., None] + values)))
        scores[order] = -1  # already selected
        order.append(int(scores.argmax()))
        total = total + values[..., order[-1]]
    return order


def backward(margins: Margins) -> list[int]:
    """Order units by repeatedly removing the one that is missed least; the first removed is last in the order."""
    values = margins.values.transpose(1, 2).contiguous()
    total, gone = values.sum(-1) + margins.fixed, list[int]()
    # Exclude units that were removed already.
    while len(gone) < margins.units:
        scores = comparable(margins.accuracy(margins.right_answers(total[..., None] - values)))
        scores[gone] = -1
        # Among ties, remove the higher number.
        gone.append(margins.units - 1 - int(scores.flip(0).argmax()))
        total = total - values[..., gone[-1]]
    return gone[::-1]


def cover(margins: Margins) -> list[int]:
    """Order units by greedy set cover: next is the unit that answers most questions which no earlier unit answers.

    When all answerable questions are covered, the cover restarts with the remaining units.
    """
    answers, weight = _single_unit_answers(margins).double(), margins.weight
    left, order = list(range(margins.units)), []
    open_ = weight.clone()
    while left:
        gains = (open_ @ answers[:, left]).round(decimals=12)
        # Everything answerable is covered; the second test avoids an endless loop for questions that no unit answers.
        if float(gains.max()) <= 0 and not torch.equal(open_, weight):
            open_ = weight.clone()
            continue
        order.append(left.pop(int(gains.argmax())))
        open_ = open_ * (1 - answers[:, order[-1]])
    return order


def bottom(margins: Margins) -> list[int]:
    """Order units in reverse of `top`."""
    return top(margins)[::-1]


METHODS: dict[str, Callable[[Margins], list[int]]] = {
    "top": top,
    "forward": forward,
    "backward": backward,
    "cover": cover,
    "bottom": bottom,
}


def random_order(units: int, seed: int) -> list[int]:
    """Return a random permutation."""
    return torch.randperm(units, generator=torch.Generator().manual_seed(seed)).tolist()


def curve(margins: Margins, order: Sequence[int]) -> Tensor:
    """Return right answers (n, U) among the candidates with the first 1, 2, … U units of an order."""
    return margins.right_answers(margins.values[:, list(order)].cumsum(1).transpose(1, 2) + margins.fixed[..., None])


def random_curves(margins: Margins, draws: int, seed: int = 0) -> Tensor:
    """Return (draws, U) fp64: accuracies with the first 1, 2, … U units of random orders."""
    orders = (random_order(margins.units, seed + i) for i in range(draws))
    return torch.stack([margins.accuracy(curve(margins, order)) for order in orders])
