"""k-NN by single units and by growing sets of them: what stands for zero-shot accuracy where an encoder has no texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tasks import knn
from .material import Neighbours

_K = 20  # DINO's headline


def neighbour_scores(material: Neighbours) -> Tensor:
    """(n, U) bool: is the vote of the nearest images right, where one unit alone tells what is near?"""
    return _votes(material, [[unit] for unit in range(material.units.number)])


def neighbour_curve(material: Neighbours, order: Sequence[int]) -> Tensor:
    """(n, U) bool: the same by the first 1, 2, … U units of an order."""
    return _votes(material, [list(order[: k + 1]) for k in range(len(order))])


def _votes(material: Neighbours, sets: list[list[int]]) -> Tensor:
    bank, test = (_units(material, f.in_memory()) for f in (material.bank, material.test))
    k = min(_K, len(bank))
    classes = 1 + int(torch.cat([material.bank_labels, material.labels]).max())
    found = []
    for units in sets:
        near = knn.nearest(test[:, units].flatten(1), bank[:, units].flatten(1), k)
        result = knn.score(near, material.bank_labels, material.labels, classes, (k,), material.config.temperature, k)
        found.append(torch.from_numpy(result.predictions["right"]))
    return torch.stack(found, dim=1)


def _units(material: Neighbours, rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (material.units.number, -1))
