"""Tasks of plug-ins whose score is a share of correct answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from ..sets.base import Fact
from ..sets.open_set import open_set
from ..sets.task_config import SetTaskConfig
from ..tasks.result import Result, wilson
from .scoring import Scoring, attach_data_info
from .task import Task

EncodeTexts = Callable[[list[str]], Tensor]


class Answers(NamedTuple):
    """Correctly answered items of a set.

    Attributes:
        correct: by metric, bool (m,), one per item; the first metric is the headline.
        chance: value of random guessing, by metric.
        keys: names of the m items; None: those of the images.
        kinds: kind of each item; each named kind gets its own metric, `METRIC/KIND`.
    """

    correct: Mapping[str, Tensor]
    chance: Mapping[str, float]
    keys: Sequence[str] | None = None
    kinds: Sequence[str] | None = None


def answers_task(
    config: type[SetTaskConfig],
    facts: str,
    answer: Callable[[Tensor, EncodeTexts, Sequence[Fact]], Answers],
    options: Callable[[Any], dict[str, Any]] = lambda task: {},
) -> Task:
    """Return an entry of `sparo.tasks` whose scores are shares of right answers, with Wilson intervals.

    Args:
        config: derives from `SetTaskConfig`, with `task: Literal[NAME] = NAME`.
        facts: annotations that the set needs for every image: a word of a layout's `kinds`.
        answer: (unit-norm encodings (n, D) of the images, a function from texts to unit-norm encodings, the
            annotations) to the answers.
        options: returns options to record in the result from a task's config, for settings that change the score.
    """

    def run(scoring: Scoring, task: Any) -> Result:
        source = open_set(task, facts)
        (images,) = scoring.features([source], task.workers)

        def score() -> Result:
            return result_of(answer(F.normalize(images.in_memory(), dim=-1), scoring.texts, images.facts), task.task)

        result = scoring.ranks.rank0_broadcast(score)
        return attach_data_info(result, images, source, options(task), list(result.keys) or None)

    return Task(config, run, lambda task: open_set(task, facts).check(), ("texts",), facts)


def result_of(answers: Answers, task: str) -> Result:
    """Return the scores, intervals and predictions of answers."""
    headline = next(iter(answers.correct))
    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    kinds = np.asarray(answers.kinds if answers.kinds is not None else [""] * len(answers.correct[headline]))
    for name, correct in answers.correct.items():
        rows = correct.numpy().astype(bool)
        for kind in ("", *dict.fromkeys(kinds[kinds != ""].tolist())):
            here = rows[kinds == kind] if kind else rows
            metric = f"{name}/{kind}" if kind else name
            metrics[metric] = float(here.mean())
            intervals[metric] = wilson(metrics[metric], len(here))
    # `sparo eval compare` pairs samples by `right`.
    predictions = {name: correct.numpy() for name, correct in answers.correct.items()}
    predictions["right"] = predictions[headline]
    chance = {f"chance_{name}": value for name, value in answers.chance.items() if name != headline}
    return Result(
        task, len(kinds), headline, metrics, answers.chance[headline], intervals, chance, {}, predictions,
        tuple(answers.keys or ()),
    )  # fmt: skip
