"""From a task's config to the set that it is scored on; how the files lie is a row of `sparo.layouts`."""

from __future__ import annotations

from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.registries import LAYOUTS

from .base import EvalSet, Limited
from .task_config import LabelledTaskConfig, SetTaskConfig
from .wds import ClassFolders, open_images


def open_set(config: SetTaskConfig, kind: str, split: str | None = None) -> EvalSet:
    """The images of a task, `limit` of them where it says so.

    Args:
        kind: the facts that the task needs of every image: label, captions, pairs, masks, …
        split: default: the config's own.

    Raises:
        DataError: a file that is missing or no such file.
        ConfigError: a layout that has other facts.
    """
    layout = LAYOUTS.get(config.layout, "layout")
    if kind not in layout.kinds:
        raise ConfigError(
            f"layout={config.layout}: has {' or '.join(layout.kinds)}, and task {config.task} needs {kind}"
        )
    eval_set = layout.open(config, kind, split or config.split)
    eval_set.home, eval_set.benchmark_name = Path(config.root), config.benchmark_name
    return eval_set if config.limit is None else Limited(eval_set, config.limit)


def _share_label_numbers(train: EvalSet, test: EvalSet, where: str) -> None:
    """A folder's own rank among its siblings is a label of its own: with another class missing it would mean another class."""
    if isinstance(train, ClassFolders) != isinstance(test, ClassFolders):
        folders, numbers = ("train", "test") if isinstance(train, ClassFolders) else ("test", "train")
        raise DataError(
            f"{folders}: has class folders, and {numbers} numbers its labels; nobody says which number is which folder; make both alike"
        )
    if not isinstance(train, ClassFolders) or not isinstance(test, ClassFolders) or train.classes == test.classes:
        return
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise DataError(
            f"test: {where} has the class {unknown[0]!r} ({len(unknown)} such), which train has not; make both alike"
        )
    test.number_by(train.classes)


def _open_from_layout(config: LabelledTaskConfig, split: str) -> EvalSet:
    """The images of one side, as the set `split` of the task's layout."""
    place = getattr(config, split)
    eval_set = open_set(SetTaskConfig(task=config.task, root=place, layout=str(config.layout), split=split), "label")
    if eval_set.kind != "label":
        raise DataError(f"{split}: {place} has several labels per image, and task {config.task} is of one")
    return eval_set


def open_labelled(config: LabelledTaskConfig) -> tuple[EvalSet, EvalSet]:
    """The training and the test images, each with its label: of class folders the number of its name among the training's.

    Raises:
        DataError: nothing there, or classes of the one that are not the other's.
        ConfigError: a layout whose images have no labels.
    """
    if config.layout is None:
        train, test = (open_images(getattr(config, key), "label", key) for key in ("train", "test"))
        _share_label_numbers(train, test, config.test)
    else:
        train, test = (_open_from_layout(config, split) for split in ("train", "test"))
        if train.own_classnames() != test.own_classnames():
            raise DataError(
                f"test: {config.test} has other classes than train, so that numbers mean others; make both alike"
            )
    return (train, test) if config.limit is None else (Limited(train, config.limit), Limited(test, config.limit))
