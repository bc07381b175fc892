"""Tasks of labelled images whose answers are learned from other images, for any set of units: k-NN votes and linear layers.

They replace zero-shot accuracy for encoders without texts. Their scores are not sums over units, so every set of units
is evaluated separately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..feature_store.feature_table import Features
from ..suite.labelled_tasks import KnnTaskConfig, refuse_no_votes
from ..tasks import knn
from .units import Units

_RIDGE = 1e-3  # relative to the mean eigenvalue


@dataclass(frozen=True)
class ProbeTask(ABC):
    """A task's training set (`bank`) and test set with labels; `data` is the identity of both."""

    units: Units
    bank: Features
    bank_labels: Tensor
    test: Features
    labels: Tensor
    data: str
    why: ClassVar[str]

    @property
    def classes(self) -> int:
        return 1 + int(torch.cat([self.bank_labels, self.labels]).max())

    def single_unit(self) -> Tensor:
        """Return (n, U) bool: right answers with each unit alone."""
        return self._answers([[unit] for unit in range(self.units.number)])

    def curve(self, order: Sequence[int]) -> Tensor:
        """Return (n, U) bool: right answers with the first 1, 2, … U units of an order."""
        return self._answers([list(order[: k + 1]) for k in range(len(order))])

    def _answers(self, sets: Sequence[Sequence[int]]) -> Tensor:
        return torch.stack([self._right_answers(units) for units in sets], dim=1)

    @abstractmethod
    def _right_answers(self, units: Sequence[int]) -> Tensor:
        """Return (n,) bool: right answers with these units only."""


@dataclass(frozen=True)
class Neighbours(ProbeTask):
    """DINO's weighted k-NN with the k of the headline.

    Attributes:
        config: the task.
        groups: groups of test images and of the bank's whose members do not vote for each other; None: all vote.
    """

    config: KnnTaskConfig
    groups: tuple[Tensor, Tensor] | None
    why = "a vote is not a sum over units"

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        test, bank = (f.in_memory().flatten(1).unflatten(-1, (self.units.number, -1)) for f in (self.test, self.bank))
        return test, bank

    def _right_answers(self, units: Sequence[int]) -> Tensor:
        test, bank = (rows[:, units].flatten(1) for rows in self._rows)
        _, k = self.config.usable_k(len(self.bank))
        near = knn.find_nearest(test, bank, k, groups=self.groups)
        refuse_no_votes(near, self.config, len(self.bank))
        result = knn.score(
            near, self.bank_labels, self.labels, self.classes, (k,), self.config.temperature, k, self.config.balanced
        )
        return torch.from_numpy(result.predictions["right"])


@dataclass(frozen=True)
class Linear(ProbeTask):
    """Linear layer by ridge regression to one-hot labels, in closed form: thousands of sets of units for one pass over the bank.

    Encodings are normalised as a whole; the penalty is a thousandth of the mean eigenvalue of their covariance. `sparo
    eval` trains clip-benchmark's logistic probe instead, whose scores differ.
    """

    why = "a linear layer is fitted for every set of units"

    @cached_property
    def _fitted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return covariance (W, W), covariance with the labels (W, C), means of encodings (W,) and labels (C,); fp64."""
        width = self.bank.width
        gram, cross = (
            torch.zeros(width, width, dtype=torch.float64),
            torch.zeros(width, self.classes, dtype=torch.float64),
        )
        total, first = torch.zeros(width, dtype=torch.float64), 0
        for block in self.bank.blocks():
            # fp64, because a covariance of unit vectors loses half of its digits as a difference of two means.
            rows = F.normalize(block.flatten(1), dim=-1).double()
            truth = F.one_hot(self.bank_labels[first : first + len(rows)], self.classes).double()
            first += len(rows)
            gram += rows.T @ rows
            cross += rows.T @ truth
            total += rows.sum(0)
        mean, share = total / first, torch.bincount(self.bank_labels, minlength=self.classes).double() / first
        return gram / first - torch.outer(mean, mean), cross / first - torch.outer(mean, share), mean, share

    @cached_property
    def _test(self) -> Tensor:
        return F.normalize(self.test.in_memory().flatten(1), dim=-1).double()

    def _right_answers(self, units: Sequence[int]) -> Tensor:
        gram, cross, mean, share = self._fitted
        size = self.bank.width // self.units.number
        at = (torch.tensor(list(units))[:, None] * size + torch.arange(size)).flatten()
        # Relative to the whole encoding, so that small sets of units are not penalised more than large ones.
        ridge = _RIDGE * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(at), dtype=torch.float64)
        weight = torch.cholesky_solve(cross[at], torch.linalg.cholesky(gram[at][:, at] + ridge))
        logits = (self._test[:, at] - mean[at]) @ weight + share
        return logits.argmax(1) == self.labels
