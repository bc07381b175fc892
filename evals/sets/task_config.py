"""Which images a task is scored on: what the configs of tasks begin with."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from sparo_train.core.config import Frozen
from sparo_train.core.errors import did_you_mean
from sparo_train.core.tables import LAYOUTS


class TaskConfig(Frozen):
    """What every entry of `eval.tasks` has: the row of `sparo.tasks` that scores it."""

    task: Any  # a Literal of one name, in each of them


def _known(layout: str) -> str:
    if layout not in LAYOUTS.names():
        raise ValueError(did_you_mean(layout, LAYOUTS.names()))
    return layout


class SetTaskConfig(TaskConfig):
    """One data set scored by one task.

    `root`: a folder in clip-benchmark's wds layout, or in the published layout that `layout` names:
    `folder` (one folder per class, named like it), `imagenet` (one folder per WordNet id; A and R are scored over the classes
    that have one), `imagenetv2` (numbered folders), `objectnet`, `karpathy` (images, with `annotations`), `sugar_crepe`,
    `torchvision` (the folder that it calls `root`, of a set that `known_as` names).
    `known_as`: clip-benchmark's name of the set, whose class names and templates are used where the folder has none.
    `limit`: so many samples, evenly spaced.  `workers`: processes that decode images.
    """

    root: str
    layout: Annotated[str, AfterValidator(_known)] = "wds"
    split: str = "test"
    known_as: str | None = None
    limit: int | None = Field(default=None, gt=0)
    workers: int = Field(default=2, ge=0)


class LabelledTaskConfig(TaskConfig):
    """Labelled images: shards with `.cls` members (a folder, a glob, a URL) or a folder of class folders.

    `resize`: of the shortest side before the middle is cut out; default: the encoder's own (DINO's: 256 for 224 pixels).
    """

    train: str
    test: str
    resize: int | None = Field(default=None, gt=0)
    limit: int | None = Field(default=None, gt=0)
    workers: int = Field(default=2, ge=0)
