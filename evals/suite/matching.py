"""Two images and two captions, to be matched (Winoground; Thrush et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sparo_train.core.config import field

from ..sets.task_config import SetTaskConfig
from .answers import Answers, EncodeTexts, answers_task, numbers_by, similarities


class MatchingTaskConfig(SetTaskConfig):
    """Pairs of images with a caption each. The group score counts pairs whose text and image scores are both right; ties lose."""

    task: Literal["matching"] = field("matching", "an entry of sparo.tasks")


def match(images: Tensor, encode: EncodeTexts, facts: Sequence[dict[str, Any]]) -> Answers:
    """Score every row of two images and two captions.

    text: for both images, the right caption is the more similar one.  image: for both captions, the right image is.  group: both.
    With random similarities, 1/4, 1/4 and 1/6 of the pairs are right.
    """
    pairs = numbers_by(facts, "row")  # a row's images follow each other, the first one first
    firsts = [facts[first] for first, _ in pairs.values()]
    texts = encode([caption for fact in firsts for caption in fact["captions"]]).unflatten(0, (-1, 2))
    cosine = similarities(images[torch.tensor(list(pairs.values()))], texts)  # (pairs, image, caption)
    own, other = cosine.diagonal(dim1=1, dim2=2), cosine.flip(2).diagonal(dim1=1, dim2=2)
    text = (own > other).all(dim=1)
    image = (own > other.flip(1)).all(dim=1)
    correct = {"group": text & image, "text": text, "image": image}
    chance = {"group": 1 / 6, "text": 1 / 4, "image": 1 / 4}
    return Answers(correct, chance, list(pairs), [fact["kind"] for fact in firsts])


MATCHING = answers_task(MatchingTaskConfig, "matches", match)
