"""Random square crops of an evaluation set, which move and scale the objects (Biza et al. 2023, Table 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from evals.sets.base import EvalSet, sha256
from evals.sets.open_set import open_set
from evals.sets.task_config import SetTaskConfig
from sparo_train.core.config import field
from sparo_train.core.rng import generator


class CroppedTaskConfig(SetTaskConfig):
    """Images with `.mask.png`, whole or cropped."""

    crop_area: float | None = field(
        None,
        "Score every image on one random square crop with at least this share of the image's area. The crop "
        "depends on the image's key only, so it is the same in every evaluation. Default: whole images.",
        gt=0,
        le=1,
        examples=[0.25],
    )


class CroppedSet(EvalSet):
    """Images and label maps of another set, cut to squares.

    The share of the area is uniform from `area` to 1, and the place is uniform. A square has at most the shorter side.
    """

    def __init__(self, whole: EvalSet, area: float):
        self.whole, self.area, self.root, self.kind = whole, area, whole.root, whole.kind
        self.home, self.benchmark_name, self.groups = whole.home, whole.benchmark_name, whole.groups
        self.published = whole.published

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, number: int) -> tuple[str, Image.Image, Any]:
        key, image, fact = self.whole.read(number)
        rng = generator(0, "crop", key)
        share = float(rng.uniform(self.area, 1))
        side = min(round((share * image.width * image.height) ** 0.5), image.width, image.height)
        left, top = (int(rng.integers(0, end - side + 1)) for end in image.size)
        labels = np.asarray(fact)[..., top : top + side, left : left + side]
        return key, image.crop((left, top, left + side, top + side)), labels

    def identity(self) -> str:
        return sha256(self.whole.identity(), f"square crops of at least {self.area}")

    def stamp(self) -> str:
        return self.whole.stamp()


def open_masks(task: CroppedTaskConfig) -> EvalSet:
    """Return the images of a task, cropped if `crop_area` is set."""
    whole = open_set(task, "masks")
    return whole if task.crop_area is None else CroppedSet(whole, task.crop_area)
