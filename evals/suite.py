"""Data sets times tasks: encode what a task needs, hand the features over, collect results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparo_train.core.distributed import Ranks, World
from sparo_train.core.errors import ConfigError, DataError, did_you_mean
from sparo_train.train.eval_config import EvalTaskConfig, KnnTaskConfig, LinearTaskConfig, SetTaskConfig

from . import data
from .data import EvalSet, Item
from .encoders import ClipEncoder, DinoEncoder, Encoder
from .image_tasks import run_knn, run_linear
from .labelled import LabelledImages
from .results import Result
from .tasks import pairs, retrieval, zeroshot

OPENAI_PHOTO = "a photo of a {c}."


class Suite:
    """Several evaluation sets, decoded once and scored as often as asked.

    Args:
        tasks: by name, as in a recipe's `eval.tasks`.
    """

    def __init__(self, tasks: Mapping[str, EvalTaskConfig]):
        self.tasks = dict(tasks)
        self._items: dict[tuple[str, int], list[Item]] = {}

    def check(self) -> None:
        """Raise `DataError` now where a set lacks a file that its task needs."""
        for name, task in self.tasks.items():
            if isinstance(task, SetTaskConfig):
                EvalSet(task.root).require(["classnames.txt"] if task.task == "zeroshot" else [])
            else:
                for key in ("train", "test"):
                    LabelledImages(getattr(task, key), _untouched, f"{name}.{key}")

    def run(
        self,
        encoder: Encoder,
        only: Sequence[str] | None = None,
        report: Callable[[str], None] | None = None,
        ranks: Ranks | None = None,
    ) -> dict[str, Result]:
        """Score `encoder` on the tasks named in `only` (default: all).

        Args:
            ranks: those that score together, each its share of the images where a task knows how; default: this process alone.
        """
        for name in only or ():
            if name not in self.tasks:
                raise DataError(f"--tasks {name}: {did_you_mean(name, self.tasks)}")
        out = {}
        for name, task in self.tasks.items():
            if only and name not in only:
                continue
            if report:
                report(name)
            out[name] = self._score(name, task, encoder, ranks or Ranks(World(), "gloo", 0.0))
        return out

    def _score(self, name: str, task: EvalTaskConfig, encoder: Encoder, ranks: Ranks) -> Result:
        if isinstance(task, KnnTaskConfig):
            return run_knn(encoder, task, ranks)
        if isinstance(task, LinearTaskConfig):
            if not isinstance(encoder, DinoEncoder):
                raise ConfigError(
                    f"{name}: task linear reads the last blocks of a DINO backbone, and {encoder.label} is none"
                )
            return run_linear(encoder, task, ranks)
        if not isinstance(encoder, ClipEncoder):
            raise ConfigError(
                f"{name}: task {task.task} needs texts encoded, and {encoder.label} encodes images alone; use knn or linear"
            )
        clip = encoder
        return ranks.first(lambda: RUNNERS[task.task](clip, EvalSet(task.root), self._read(task.root, clip.image_size)))

    def _read(self, root: str, size: int) -> list[Item]:
        if (root, size) not in self._items:
            items = list(EvalSet(root).items(size))
            if not items:
                raise DataError(f"{root}: an evaluation set without samples")
            self._items[root, size] = items
        return self._items[root, size]


def _untouched(image: Any, _number: int) -> Any:
    return image


def run_zeroshot(encoder: ClipEncoder, source: EvalSet, items: Sequence[Item]) -> Result:
    """Accuracy over `classnames.txt` with the set's templates (or one photo template)."""
    names = source.lines("classnames.txt")
    try:
        templates = source.lines("zeroshot_classification_templates.txt")
    except DataError:
        templates = [OPENAI_PHOTO]
    labels = torch.tensor([data.label(item, source.root) for item in items])
    if int(labels.max()) >= len(names) or int(labels.min()) < 0:
        raise DataError(
            f"{source.root}: labels go up to {int(labels.max())}, classnames.txt names {len(names)} classes"
        )
    weights = zeroshot.classifier(encoder.text(zeroshot.prompts(names, templates)), len(names))
    return zeroshot.score(encoder.image(item.pixels for item in items), weights, labels)


def run_retrieval(encoder: ClipEncoder, source: EvalSet, items: Sequence[Item]) -> Result:
    """R@1, 5, 10 in both directions over the set's captions."""
    texts = [data.captions(item, source.root) for item in items]
    owner = torch.tensor([i for i, lines in enumerate(texts) for _ in lines])
    flat = [line for lines in texts for line in lines]
    return retrieval.score(encoder.image(item.pixels for item in items), encoder.text(flat), owner)


def run_pairs(encoder: ClipEncoder, source: EvalSet, items: Sequence[Item]) -> Result:
    """Accuracy of true against false captions."""
    facts = [data.pair(item, source.root) for item in items]
    image = encoder.image(item.pixels for item in items)
    true, false = (encoder.text([f[key] for f in facts]) for key in ("caption", "negative_caption"))
    return pairs.score(image, true, false, [f["kind"] for f in facts])


RUNNERS: dict[str, Callable[[ClipEncoder, EvalSet, Sequence[Item]], Result]] = {
    "zeroshot": run_zeroshot,
    "retrieval": run_retrieval,
    "pairs": run_pairs,
}
