"""Opening the set of a task's config; the storage format is an entry of `sparo.layouts`."""

from __future__ import annotations

import logging
from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import suggest_path
from sparo_train.core.logs import warn_once
from sparo_train.core.registries import LAYOUTS
from sparo_train.data.servers.remote import remedy

from .base import EvalSet
from .table_set import TableSet
from .task_config import LabelledTaskConfig, SetTaskConfig
from .wds import ClassFolders, open_images

logger = logging.getLogger(__name__)
_OWN_LAYOUTS = {"wds", "folder", "table"}  # layouts that users write for their own images


def open_set(config: SetTaskConfig, kind: str, split: str | None = None) -> EvalSet:
    """Return the images of a task, limited to `limit` of them if set.

    Args:
        config: the task.
        kind: annotations that the task needs of every image: label, captions, pairs, masks, …
        split: default: the config's own.

    Raises:
        DataError: a file is missing or has another format.
        ConfigError: the layout has other annotations.
    """
    layout = LAYOUTS.get(config.layout, "layout")
    if kind not in layout.kinds:
        others = [name for name in LAYOUTS.names() if kind in LAYOUTS.get(name).kinds]
        raise ConfigError(
            f"layout={config.layout}: has {' or '.join(layout.kinds)}, but task {config.task} needs {kind}. Layouts with {kind}: "
            f"{', '.join(others) or 'none'}."
        )
    if "://" not in config.root and not Path(config.root).exists():
        advice = remedy(config.root) or f"; {suggest_path(Path(config.root))}"
        raise DataError(f"{config.root}: no such file or folder{advice}")
    eval_set = layout.open(config, kind, split or config.split)
    eval_set.home, eval_set.benchmark_name = Path(config.root), config.benchmark_name
    named = config.benchmark_name is not None or config.layout not in _OWN_LAYOUTS
    eval_set.published = named if config.published is None else config.published
    return eval_set if config.limit is None else eval_set.limit_to(config.limit)


def _share_label_numbers(train: EvalSet, test: EvalSet, where: str) -> None:
    """Make labels of train and test comparable: a folder's label is its rank, which shifts if another class is missing."""
    if isinstance(train, ClassFolders) != isinstance(test, ClassFolders):
        folders, numbers = ("train", "test") if isinstance(train, ClassFolders) else ("test", "train")
        raise DataError(
            f"{folders}: has class folders, but {numbers} has numeric labels, so the classes cannot be matched. Use the same kind of labels in both splits."
        )
    if not isinstance(train, ClassFolders) or not isinstance(test, ClassFolders) or train.classes == test.classes:
        return
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise DataError(
            f"test: {where} has {len(unknown)} class(es) that `train` lacks, such as {unknown[0]!r}. Use the same "
            "class folders in both."
        )
    test.number_by(train.classes)


def warn_of_untrained_classes(train: EvalSet, test: EvalSet) -> None:
    """Warn of classes of a table that only test images have, because no score can be right for them."""
    if not (isinstance(train, TableSet) and isinstance(test, TableSet) and train.kind == "label"):
        return
    present = [{table.describe(number)[1] for number in range(len(table))} for table in (train, test)]
    if missing := sorted(present[1] - present[0]):
        names = [test.classes[number] if test.classes else str(number) for number in missing]
        warn_once(
            logger,
            f"{test.root}: {len(missing)} class(es) have test images but no training images, such as {names[0]!r}. "
            "Their test images count as wrong. Add training images, or remove these classes.",
        )


def refuse_shared_groups(train: EvalSet, test: EvalSet, name: str = "train") -> None:
    """Raise `DataError` if images of one group (patient, slide) are in both sets; `name` is that of the first one."""
    if both := set(train.groups or ()) & set(test.groups or ()):
        raise DataError(
            f"test: shares {len(both)} group(s) of images with {name}, such as {min(both)!r}, so the score would be "
            "too high. Set columns.test_share, or split by groups."
        )


def _open_from_layout(config: LabelledTaskConfig, split: str, kind: str) -> EvalSet:
    """Return the images of one side, as the set `split` of the task's layout."""
    place = getattr(config, split)
    own = SetTaskConfig(
        task=config.task,
        root=place,
        layout=str(config.layout),
        split=split,
        columns=config.columns,
        published=config.published,
    )
    eval_set = open_set(own, kind)
    if eval_set.kind != kind:
        raise DataError(f"{split}: {place} has several labels per image, but task {config.task} needs one")
    return eval_set


def open_labelled(config: LabelledTaskConfig, kind: str = "label") -> tuple[EvalSet, EvalSet]:
    """Return the training and the test images with labels; for class folders, the rank of the name among training's.

    Args:
        config: the task.
        kind: annotations that the task needs of every image.

    Raises:
        DataError: nothing there, or classes of one side are not those of the other.
        ConfigError: a layout whose images have no labels.
    """
    if config.layout is None and kind == "target":
        raise ConfigError(
            f"layout: missing, but task {config.task} needs a table with a number for each image. Set layout=table."
        )
    if config.layout is None:
        train, test = (open_images(getattr(config, key), kind, key) for key in ("train", "test"))
        train.published = test.published = bool(config.published)
        _share_label_numbers(train, test, config.test)
    else:
        train, test = (_open_from_layout(config, split, kind) for split in ("train", "test"))
        if train.own_classnames() != test.own_classnames():
            raise DataError(
                f"test: {config.test} and train have different classes, so label ids do not match. Use the same classes in both."
            )
    warn_of_untrained_classes(train, test)
    if not config.groups_may_overlap:
        refuse_shared_groups(train, test)
    return (train, test) if config.limit is None else (train.limit_to(config.limit), test.limit_to(config.limit))
