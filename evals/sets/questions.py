"""Sets of questions: images and texts, some of them belonging together, as in Winoground, ARO or NegBench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from PIL import Image

from sparo_train.core.errors import DataError

from .base import EvalSet, Fact, evenly, sha256
from .image_files import FileSet
from .pictures import open_image

Box = tuple[float, float, float, float]  # left, top, width, height in pixels


class Question(NamedTuple):
    """Images and texts of one item.

    Attributes:
        images: numbers of its images in the set.
        texts: its texts.
        kind: category, whose score is also reported.
        key: its name in the predictions file.
        answer: position of the right text (with one text: of the right image), from 0, for task `choice`; for task
            `associations`, the number of right images, which are the first.
        groups: (metric, name of the group), such as ("pair", "mug plate on"); for this metric, all questions of a group must
            be right.
    """

    images: tuple[int, ...]
    texts: tuple[str, ...]
    kind: str = ""
    key: str = ""
    answer: int = 0
    groups: tuple[tuple[str, str], ...] = ()


class ImageRef(NamedTuple):
    """An image file below the set's root, or the region `box` of it."""

    name: str
    box: Box | None = None

    @property
    def key(self) -> str:
        """Return its name in results."""
        return self.name if self.box is None else f"{self.name}#{','.join(f'{value:g}' for value in self.box)}"


class Item(NamedTuple):
    """A question before its images are numbered: like `Question`, with `ImageRef`s."""

    images: tuple[ImageRef, ...]
    texts: tuple[str, ...]
    kind: str = ""
    key: str = ""
    answer: int = 0
    groups: tuple[tuple[str, str], ...] = ()


class QuestionSet(FileSet):
    """Questions over distinct images, which are encoded once each; its annotation is the list of its right captions.

    Args:
        root: base folder of the images.
        items: the questions.
        where: the annotation file, for errors.

    Raises:
        DataError: no questions, or the answer of one is not among its choices.
    """

    shares_images = True
    skipped = 0  # questions whose images do not exist
    incomplete = ""  # which parts of a published set are missing, in words

    def __init__(self, root: Path, items: Sequence[Item], where: object):
        if not items:
            raise DataError(f"{where}: contains no questions. Fetch it again.")
        if any(item.kind for item in items):
            # Otherwise rows without a kind would count for some scores and not for others.
            items = [item._replace(kind=item.kind or "unnamed") for item in items]
        images = list(dict.fromkeys(ref for item in items for ref in item.images))
        number = {ref: i for i, ref in enumerate(images)}
        self.questions = [Question(tuple(number[ref] for ref in item.images), *item[1:]) for item in items]
        for question in self.questions:
            if not question.images or not question.texts or not all(text.strip() for text in question.texts):
                raise DataError(
                    f"{where}: question {question.key}: must have an image and no empty caption, got {len(question.images)} image(s) and captions "
                    f"{str(question.texts)[:80]}. Complete the row, or remove it."
                )
            choices = len(question.images) if len(question.texts) == 1 else len(question.texts)
            if not 0 <= question.answer < choices:
                raise DataError(
                    f"{where}: question {question.key}: the answer must be from 0 to {choices - 1}, got {question.answer}. "
                    "Correct it."
                )
        self._boxes = [ref.box for ref in images]
        questions = json.dumps(self.questions).encode()
        captions = self._right_captions(self.questions, len(images))
        super().__init__(root, [ref.name for ref in images], captions, "questions", questions)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        path = self.root / self._names[number]
        image = _bgr_array(path) if path.suffix == ".npy" else open_image(path, not self.published)
        return self._key(number), self._crop(number, image), self._facts[number]

    def describe(self, number: int) -> tuple[str, Fact]:
        return self._key(number), self._facts[number]

    def digest(self, number: int) -> bytes:
        content, box = self._content_digest(number), self._boxes[number]
        return content if box is None else xxhash.xxh3_128_digest(content + repr(box).encode())

    def _content_digest(self, number: int) -> bytes:
        return super().digest(number)

    def _key(self, number: int) -> str:
        return ImageRef(self._names[number], self._boxes[number]).key

    def file(self, number: int) -> str:
        """Return the file of an image below the root; regions of one picture have one file."""
        return self._names[number]

    def _crop(self, number: int, image: Image.Image) -> Image.Image:
        """Return the region of an image, black where it exceeds the image, as in ARO's and CREPE's scripts."""
        box = self._boxes[number]
        if box is None:
            return image
        left, top, width, height = box
        if (
            width < 1
            or height < 1
            or left >= image.width
            or top >= image.height
            or left + width <= 0
            or top + height <= 0
        ):
            raise DataError(
                f"{self.root / self._names[number]}: the region {left:g},{top:g},{width:g},{height:g} is outside the image of "
                f"{image.width} x {image.height} pixels. Correct the annotations, or fetch the image again."
            )
        return image.crop((round(left), round(top), round(left + width), round(top + height)))

    def identity(self) -> str:
        return sha256(super().identity(), json.dumps(self._boxes))

    def limit_to(self, count: int) -> EvalSet:
        """Return evenly spaced questions with the images that they need; questions of a group stay together."""
        units: dict[object, list[Question]] = {}
        for place, question in enumerate(self.questions):
            units.setdefault(question.groups[-1] if question.groups else place, []).append(question)
        groups, mean_size = list(units.values()), len(self.questions) / len(units)
        part, few = copy(self), evenly(len(groups), max(1, int(count / mean_size)))
        chosen = [question for i in few for question in groups[i]]
        numbers = sorted({number for question in chosen for number in question.images})
        place = {number: i for i, number in enumerate(numbers)}
        part.questions = [q._replace(images=tuple(place[number] for number in q.images)) for q in chosen]
        part._names, part._boxes = ([table[i] for i in numbers] for table in (self._names, self._boxes))
        part._facts, part.part_of = self._right_captions(part.questions, len(numbers)), self
        for cached in ("_stat", "_digests"):  # of all images
            vars(part).pop(cached, None)
        part._extra = json.dumps(part.questions).encode()
        return part

    def _right_captions(self, questions: Sequence[Question], count: int) -> list[list[str]]:
        """Return the captions that are right for each of `count` images, which pages show with it."""
        captions: list[dict[str, None]] = [{} for _ in range(count)]
        for question in questions:
            for image, text in self.right_pairs(question):
                captions[image][text] = None
        return [list(texts) for texts in captions]

    def right_pairs(self, question: Question) -> list[tuple[int, str]]:
        """Return the images and texts of a question that belong together."""
        if len(question.images) == len(question.texts):
            return list(zip(question.images, question.texts, strict=True))
        if len(question.texts) == 1:
            return [(question.images[question.answer], question.texts[0])]
        return [(question.images[0], question.texts[question.answer])]


class AssociationSet(QuestionSet):
    """Questions of a text and several images; the first `answer` images belong to the text."""

    def right_pairs(self, question: Question) -> list[tuple[int, str]]:
        return [(image, question.texts[0]) for image in question.images[: question.answer]]


def _bgr_array(path: Path) -> Image.Image:
    """Return the image of a NumPy file (H, W, 3) uint8 in blue, green, red, as EqBen stores frames of YouCook2. Raises `DataError`."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: is not readable as a NumPy file ({error}). Fetch it again.") from None
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise DataError(f"{path}: expected (H, W, 3) uint8, got {array.shape} {array.dtype}. Fetch it again.")
    return Image.fromarray(np.ascontiguousarray(array[:, :, ::-1]), "RGB")
