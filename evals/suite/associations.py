"""Task of associations: the images that a word goes with, as in WinoGAViL."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from sparo_train.core.config import field
from sparo_train.core.errors import ConfigError, DataError

from ..sets.base import sha256
from ..sets.open_set import open_set
from ..sets.questions import QuestionSet
from ..sets.task_config import SetTaskConfig
from ..tasks import associations
from ..tasks.questions import similarities
from ..tasks.result import Result
from .question_tasks import encode_blocks
from .scoring import Scoring, attach_data_info
from .task import Task


class AssociationsTaskConfig(SetTaskConfig):
    """Images that a word goes with, scored by the Jaccard index as in WinoGAViL. Ties lose."""

    task: Literal["associations"] = field("associations", "Kind of the task: an entry of sparo.tasks.")
    headline: Literal["jaccard", "jaccard/5-6", "jaccard/10-12"] = field(
        "jaccard",
        "Metric that tables show: the Jaccard index over all questions, over those with 5 or 6 images, or over those with 10 "
        "or 12 images.",
    )


def run_associations(scoring: Scoring, task: AssociationsTaskConfig) -> Result:
    """Compute the Jaccard index of the right images and of as many that are most similar to the text."""
    source = _open(task)
    questions = source.questions
    kinds = [question.kind for question in questions]
    (images,) = scoring.features([source], task.workers)

    def score() -> Result:
        texts = scoring.text_rows([question.texts[0] for question in questions])
        values = torch.empty(len(questions), dtype=torch.float64)
        for block in encode_blocks(questions, lambda of: F.normalize(images.rows(of), dim=-1), texts):
            similarity = similarities(block.images, block.texts)[..., 0]
            values[block.numbers] = associations.jaccard(similarity, block.questions[0].answer)
        chances = [associations.chance(len(question.images), question.answer) for question in questions]
        return associations.score(values, chances, kinds, task.headline)

    options = {"questions": sha256(*(str(question) for question in questions))[:16], "ties": "lose"}
    keys = [question.key for question in questions]
    return attach_data_info(scoring.ranks.rank0_broadcast(score), images, source, options, keys)


def _open(task: AssociationsTaskConfig) -> QuestionSet:
    """Return the questions. Raises `ConfigError` if none has the number of images that the headline names."""
    source = open_set(task, "associations")
    assert isinstance(source, QuestionSet)
    kind = task.headline.partition("/")[2]
    if kind and all(question.kind != kind for question in source.questions):
        raise ConfigError(
            f"headline={task.headline}: scores only questions with {kind} images, but {task.root} has none. Set headline=jaccard."
        )
    if wrong := next((q for q in source.questions if len(q.texts) != 1 or len(q.images) < 2), None):
        raise DataError(f"{task.root}: question {wrong.key}: needs one text and at least two images")
    return source


ASSOCIATIONS = Task(
    AssociationsTaskConfig, run_associations, lambda task: _open(task).check(), ("texts",), "associations"
)
