"""Tasks of plug-ins whose score is a share of correct answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..sets.base import Fact
from ..sets.open_set import open_set
from ..sets.task_config import SetTaskConfig
from ..tasks import questions
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info
from .task import Task

EncodeTexts = Callable[[list[str]], Tensor]


class Answers(NamedTuple):
    """Correctly answered items of a set.

    Attributes:
        correct: by metric, bool (m,), one per item; the first metric is the headline.
        chance: value of random guessing, by metric.
        keys: names of the m items; None: those of the images.
        kinds: kind of each item; if there are several, each gets its own metric, `METRIC/KIND`.
        images: name of the image of each item. Answers about one image are not independent, and intervals take that
            into account. Default: independent.
    """

    correct: Mapping[str, Tensor]
    chance: Mapping[str, float]
    keys: Sequence[str] | None = None
    kinds: Sequence[str] | None = None
    images: Sequence[str] | None = None


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
            return score_answers(
                answer(F.normalize(images.in_memory(), dim=-1), scoring.texts, images.facts), task.task
            )

        result = scoring.ranks.rank0_broadcast(score)
        return attach_data_info(result, images, source, options(task), list(result.keys) or None)

    return Task(config, run, lambda task: open_set(task, facts).check(), ("texts",), facts)


def score_answers(answers: Answers, task: str) -> Result:
    """Return the scores, intervals and predictions of answers."""
    n = len(next(iter(answers.correct.values())))
    for name in ("keys", "kinds", "images"):
        given = getattr(answers, name)
        if given is not None and len(given) != n:
            raise ValueError(f"Answers.{name}: has {len(given)} entries for {n} answers. Give one for each answer.")
    scored = questions.Answers(
        {name: correct.bool() for name, correct in answers.correct.items()},
        {name: torch.full((n,), value, dtype=torch.float64) for name, value in answers.chance.items()},
        answers.kinds or [""] * n,
        answers.keys or (),
        images=[[image] for image in answers.images or ()],
    )
    return questions.score(task, scored)._replace(n=n)
