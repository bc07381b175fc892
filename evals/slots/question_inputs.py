"""Questions about images and texts by unit: a similarity is a sum over units, and so is every comparison of similarities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..feature_store.feature_table import Features
from ..sets.base import Pair
from ..sets.questions import Question
from ..suite.question_tasks import QuestionsTaskConfig, choose_form, encode_blocks
from .margins import Average, Margins
from .units import Units


class Questions(NamedTuple):
    """Task of questions; `texts` returns unit-norm encodings (n, D)."""

    units: Units
    features: Features
    texts: Callable[[Sequence[str]], Tensor]
    task: QuestionsTaskConfig
    questions: Sequence[Question]
    data: str

    @property
    def average(self) -> Average:
        return self.task.average

    @property
    def keys(self) -> list[str]:
        return [self.features.keys[question.images[0]] for question in self.questions]

    @property
    def kinds(self) -> list[str]:
        """Return the kind of each question."""
        return [question.kind for question in self.questions]

    def margins(self) -> Margins:
        """Return the comparisons of the headline metric; a question with fewer than others repeats its last one."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        units = self.units
        for block in encode_blocks(self.questions, self.features.rows, self.texts):
            comparisons = next(iter(choose_form(self.task, block.questions[0]).comparisons.values()))
            images = units.images(block.images.flatten(0, 1)).unflatten(0, block.images.shape[:2])
            texts = units.texts(block.texts.flatten(0, 1)).unflatten(0, block.texts.shape[:2])
            # (b, m, 1, U, d) by (b, 1, k, U or 1, d)
            similarity = (images[:, :, None] * texts[:, None]).sum(-1)
            values = torch.einsum("bmku,cmk->buc", similarity.double(), comparisons.rows).float()
            parts.append((block.numbers, values, comparisons.tie.expand(len(values), -1)))
        width = max(values.shape[2] for _, values, _ in parts)
        shape = (len(self.questions), parts[0][1].shape[1], width)
        share, tie = torch.empty(shape), torch.empty(shape[0], width, dtype=torch.bool)
        for numbers, values, ties in parts:
            columns = torch.arange(width).clamp(max=values.shape[2] - 1)
            share[numbers], tie[numbers] = values[:, :, columns], ties[:, columns]
        kinds = list(dict.fromkeys(self.kinds))
        table = torch.tensor([kinds.index(kind) if self.average == "macro" else 0 for kind in self.kinds])
        own = units.number
        return Margins(share[:, :own].contiguous(), share[:, own:].sum(1), tie, table, self.keys)

    def caption_pairs(self) -> list[tuple[int, Pair]]:
        """Return an image and a pair for every right text with each wrong one, on which masks are trained."""
        pairs = []
        for question in self.questions:
            for image, right, wrong in _right_and_wrong(question, self.task.task):
                pairs.append(
                    (
                        question.images[image],
                        Pair(question.kind, question.texts[right], question.texts[wrong], question.key),
                    )
                )
        return pairs


def _right_and_wrong(question: Question, task: str) -> list[tuple[int, int, int]]:
    """Return (image, right text, wrong text) by their places in the question."""
    places = range(len(question.texts))
    if task == "matching":
        return [(i, i, j) for i in places for j in places if i != j]
    if task == "paraphrases":
        return [(0, 0, 2), (0, 1, 2)]
    return [(0, question.answer, j) for j in places if j != question.answer]
