"""From a task's config to the set that it is scored on; how the files lie is a row of `sparo.layouts`."""

from __future__ import annotations

from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.tables import LAYOUTS

from .base import EvalSet, Limited
from .task_config import LabelledTaskConfig, SetTaskConfig
from .wds import SourceSet


def open_set(config: SetTaskConfig, kind: str, split: str | None = None) -> EvalSet:
    """The images of a task, `limit` of them where it says so.

    Args:
        kind: the facts that the task needs of every image: label, captions, pairs, masks, …
        split: default: the config's own.

    Raises:
        DataError: a file that is missing or no such file.
        ConfigError: a layout that has other facts.
    """
    layout = LAYOUTS.row(config.layout, "layout")
    if kind not in layout.kinds:
        raise ConfigError(
            f"layout={config.layout}: has {' or '.join(layout.kinds)}, and task {config.task} needs {kind}"
        )
    found = layout.open(config, kind, split or config.split)
    found.home, found.known_as = Path(config.root), config.known_as
    return found if config.limit is None else Limited(found, config.limit)


def _share_label_numbers(train: SourceSet, test: SourceSet, where: str) -> None:
    """A folder's own rank among its siblings is a label of its own: with another class missing it would mean another class."""
    known, asked = train.classes, test.classes
    if (known is None) != (asked is None):
        folders, numbers = ("train", "test") if asked is None else ("test", "train")
        raise DataError(
            f"{folders}: has class folders, and {numbers} numbers its labels; nobody says which number is which folder; make both alike"
        )
    if known is None or asked is None or known == asked:
        return
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise DataError(
            f"test: {where} has the class {unknown[0]!r} ({len(unknown)} such), which train has not; make both alike"
        )
    test.number_by(known)


def open_labelled(config: LabelledTaskConfig) -> tuple[EvalSet, EvalSet]:
    """The training and the test images, each with its label: of class folders the number of its name among the training's.

    Raises:
        DataError: nothing there, or a test class that training does not have.
    """
    train, test = (SourceSet(getattr(config, key), "label", key) for key in ("train", "test"))
    _share_label_numbers(train, test, config.test)
    return (train, test) if config.limit is None else (Limited(train, config.limit), Limited(test, config.limit))
