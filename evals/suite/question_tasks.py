"""Tasks on questions about images and texts: choice of a caption or an image, matching (Winoground), and paraphrases (SugarCrepe++)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparo_train.core.config import field
from sparo_train.core.errors import DataError

from ..sets.base import sha256
from ..sets.open_set import open_set
from ..sets.questions import Question, QuestionSet
from ..sets.task_config import SetTaskConfig
from ..tasks import questions as forms
from ..tasks import textonly
from ..tasks.questions import Answers, Form
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info
from .task import Task

_BLOCK, _ENTRIES = 1024, 2**16  # most questions, and images and texts, whose encodings are in memory at once
Average = Literal["macro", "micro"]


class QuestionsTaskConfig(SetTaskConfig):
    """Questions of a set; each has images and texts."""

    average: Average = field("micro", "Mean over questions (micro), or over kinds of questions (macro).")
    exclude_kinds: tuple[str, ...] = field(
        (), "Kinds of questions that are not scored.", strict=False, examples=[["near", "next to"]]
    )
    min_per_kind: int = field(1, "Kinds with fewer questions than this are not scored.", gt=0)


class ChoiceTaskConfig(QuestionsTaskConfig):
    """One right caption of an image among several, or one right image of a caption."""

    task: Literal["choice"] = field("choice", "Kind of the task: an entry of sparo.tasks.")
    ties: forms.Ties = field(
        "lose",
        "Outcome if choices are equally similar. lose: the answer is wrong. first: the choice listed first is taken, as by argmax.",
    )


class MatchingTaskConfig(QuestionsTaskConfig):
    """Several images with as many captions; caption i belongs to image i. Ties lose."""

    task: Literal["matching"] = field("matching", "Kind of the task: an entry of sparo.tasks.")
    headline: Literal["group", "text", "image", "group_match"] = field("group", "Metric that tables show.")


class ParaphrasesTaskConfig(QuestionsTaskConfig):
    """An image with two right captions and a wrong one (SugarCrepe++). Ties lose."""

    task: Literal["paraphrases"] = field("paraphrases", "Kind of the task: an entry of sparo.tasks.")


class Encoded(NamedTuple):
    """Questions of equal shape with encodings of their images (b, m, D) and texts (b, k, D)."""

    numbers: Tensor
    questions: Sequence[Question]
    images: Tensor
    texts: Tensor


def load_questions(task: QuestionsTaskConfig) -> tuple[QuestionSet, list[Question]]:
    """Return the set of a task, and the questions that are scored.

    Raises:
        DataError: no question is left, or one has the wrong number of images or texts for the task.
    """
    source = open_set(task, "questions")
    assert isinstance(source, QuestionSet)
    whole = source if source.part_of is None else source.part_of
    assert isinstance(whole, QuestionSet)
    counts = Counter(question.kind for question in whole.questions)
    kept = [q for q in source.questions if q.kind not in task.exclude_kinds and counts[q.kind] >= task.min_per_kind]
    if not kept:
        raise DataError(f"{task.root}: no question is left. Lower min_per_kind, or exclude fewer kinds.")
    for question in kept:
        if question.answer and task.task != "choice":
            raise DataError(
                f"{task.root}: question {question.key}: columns.answer applies to task `choice` only. Remove it."
            )
        if problem := _misfit(task, len(question.images), len(question.texts)):
            raise DataError(
                f"{task.root}: question {question.key}: task {task.task} needs {problem}, got {len(question.images)} image(s) and "
                f"{len(question.texts)} text(s). Correct the columns, or use another task."
            )
    return source, kept


def _misfit(task: QuestionsTaskConfig, images: int, texts: int) -> str:
    if task.task == "choice" and (min(images, texts) != 1 or max(images, texts) < 2):
        return "an image with several texts, or a text with several images"
    if task.task == "matching" and (images != texts or images < 2):
        return "as many texts as images, at least two"
    if task.task == "paraphrases" and (images, texts) != (1, 3):
        return "an image with three texts"
    return ""


def choose_form(task: QuestionsTaskConfig, question: Question) -> Form:
    """Return the comparisons that a question's answer consists of; the task's headline metric is the first."""
    if isinstance(task, ChoiceTaskConfig):
        return _choice((len(question.images), len(question.texts)), question.answer, task.ties)
    if isinstance(task, MatchingTaskConfig):
        form = _matching(len(question.images))
        names = sorted(form.comparisons, key=lambda name: name != task.headline)
        return form._replace(comparisons={name: form.comparisons[name] for name in names})
    return forms.paraphrases()


_choice, _matching = lru_cache(8)(forms.choice), lru_cache(8)(forms.matching)


def encode_blocks(
    questions: Sequence[Question], images: Callable[[Tensor], Tensor], texts: Callable[[Sequence[str]], Tensor]
) -> Iterator[Encoded]:
    """Yield questions in blocks of equal numbers of images and texts and equal answers, so that memory does not grow with the set.

    Args:
        questions: the questions.
        images: returns unit-norm encodings (n, D) of images by number.
        texts: returns unit-norm encodings (n, D) of texts.
    """
    groups: dict[tuple[int, int, int], list[int]] = {}
    for number, question in enumerate(questions):
        groups.setdefault((len(question.images), len(question.texts), question.answer), []).append(number)
    for numbers in groups.values():
        first = questions[numbers[0]]
        size = max(1, min(_BLOCK, _ENTRIES // (len(first.images) + len(first.texts))))
        for block in torch.tensor(numbers).split(size):
            some = [questions[i] for i in block.tolist()]
            of = torch.tensor([question.images for question in some])
            words = [text for question in some for text in question.texts]
            yield Encoded(
                block, some, images(of.flatten()).unflatten(0, of.shape), texts(words).unflatten(0, (len(some), -1))
            )


def _run(scoring: Scoring, task: QuestionsTaskConfig) -> Result:
    source, questions = load_questions(task)
    (images,) = scoring.features([source], task.workers)

    def score() -> Result:
        texts = scoring.text_rows([text for question in questions for text in question.texts])
        right: dict[str, Tensor] = {}
        chance: dict[str, Tensor] = {}
        ties = 0
        for block in encode_blocks(questions, lambda of: F.normalize(images.rows(of), dim=-1), texts):
            form = choose_form(task, block.questions[0])
            similarity = forms.similarities(block.images, block.texts)
            decided = {name: comparisons.decide(similarity) for name, comparisons in form.comparisons.items()}
            answers = {name: correct for name, (correct, _) in decided.items()}
            ties += int(next(iter(decided.values()))[1].sum())
            if isinstance(task, ParaphrasesTaskConfig):
                answers["tot"] = forms.text_only_paraphrases(block.texts)
            for name, values in answers.items():
                right.setdefault(name, torch.zeros(len(questions), dtype=torch.bool))[block.numbers] = values
                chance.setdefault(name, torch.full((len(questions),), torch.nan))[block.numbers] = form.chance[name]
        # Questions with many images have no group_match, so a set that contains one has none.
        right = {name: values for name, values in right.items() if not chance[name].isnan().any()}
        chance = {name: chance[name] for name in right}
        kinds, keys, groups = zip(*((q.kind, q.key, q.groups) for q in questions), strict=True)
        # Regions of one file, and copies of an image in rows of their own, are not independent.
        first = images.first_copies
        files = [{name for n in question.images for name in (source.file(n), first[n])} for question in questions]
        result = forms.score(task.task, Answers(right, chance, kinds, keys, groups, files), task.average)
        return _with_blind(result._replace(counts={**result.counts, "ties": ties}), task, questions)

    options: dict[str, Any] = {"questions": sha256(*(str(question) for question in questions))[:16]}
    if task.exclude_kinds or task.min_per_kind > 1:
        options |= {"exclude_kinds": sha256(*task.exclude_kinds)[:16], "min_per_kind": task.min_per_kind}
    if isinstance(task, ChoiceTaskConfig):
        options["ties"] = task.ties
    result = scoring.ranks.rank0_broadcast(score)
    if excluded := len(source.questions) - len(questions):
        result = result._replace(counts={**result.counts, "excluded": excluded})
    if source.skipped:
        options["skipped"] = {"images are missing": source.skipped}
        result = result._replace(counts={**result.counts, "skipped": source.skipped})
    return attach_data_info(result, images, source, options, list(result.keys))


def _with_blind(result: Result, task: QuestionsTaskConfig, questions: Sequence[Question]) -> Result:
    """Add the score of the best guesser that reads the texts only; matching has none, because a text is right for one image and wrong for another."""
    if isinstance(task, MatchingTaskConfig) or any(len(question.texts) == 1 for question in questions):
        return result
    # In paraphrases, the wrong text is the one to find.
    odd_one_out = isinstance(task, ParaphrasesTaskConfig)
    choices = [textonly.Choice(q.texts, 2 if odd_one_out else q.answer, q.images[0]) for q in questions]
    return textonly.attach(result, choices, [q.kind for q in questions], task.average)


def _check(task: QuestionsTaskConfig) -> None:
    load_questions(task)[0].check()


CHOICE, MATCHING, PARAPHRASES = (
    Task(config, _run, _check, ("texts",), "questions")
    for config in (ChoiceTaskConfig, MatchingTaskConfig, ParaphrasesTaskConfig)
)
