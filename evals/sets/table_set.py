"""Sets of images with a table of captions, labels, numbers or masks: CSV, TSV, JSON or JSON lines, read by the columns that a recipe names."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import read_text
from sparo_train.core.logs import warn_once
from sparo_train.data.sources.folder import class_order

from .base import FactKind, Layout, Pair, sha256
from .image_files import FileSet, MaskedFiles
from .question_table import find_image, open_questions
from .table_rows import TableRow, is_whole_number, table_rows
from .task_config import TableColumns


def open_table(config: Any, kind: FactKind, split: str) -> FileSet:
    """Open the set that a task's `root` and `columns` describe.

    Raises:
        ConfigError: no `columns`, or not those that the task needs.
        DataError: the table cannot be read, or a row lacks a column.
    """
    columns: TableColumns | None = config.columns
    if columns is None:
        raise ConfigError(
            "layout=table: needs the key `columns`, which names the table's columns of images and captions"
        )
    if columns.split is None and columns.test_share is None and split != config.split:
        raise ConfigError(
            f"columns.split: missing, but task {config.task} needs the rows of split {split!r}. Name the column that contains each row's split."
        )
    if columns.test_share is not None and split not in ("train", "test"):
        raise ConfigError(
            "columns.test_share: creates only the splits `train` and `test`, but the task reads the split "
            f"{split!r}. Set the split of the task to `train` or `test`."
        )
    root = Path(config.root)
    if kind == "questions":
        return open_questions(root, columns, split)
    path = root / columns.file
    text = read_text(path, DataError)
    if kind == "label" and columns.labels is not None:
        kind = "labels"
    make_facts = partial(_metadata_facts, config.group_by) if kind == "metadata" else _FACTS[kind]
    rows = [TableRow(row, f"{path}: row {number + 1}") for number, row in enumerate(table_rows(text, path))]
    classes = _class_names(path, rows, columns, kind, numbered=config.task == "zeroshot")
    if kind == "labels" and not classes:
        raise DataError(f"{path}: in {columns.labels}, no row has the name of a class. Correct columns.labels.")
    _refuse_similar_splits(path, columns, rows)
    test_units = _test_units(columns, rows)
    images: dict[str, Any] = {}
    groups: dict[str, str] = {}
    for number, values in enumerate(rows):
        names = [find_image(root, columns, values.fill(template)) for template in columns.images]
        if columns.split is not None and values.value(columns.split) != split:
            continue
        if columns.test_share is not None and (_unit(columns, values) in test_units) != (split == "test"):
            continue
        key = str(number) if columns.key is None else values.value(columns.key)
        values.classes = classes
        for name, fact in zip(names, make_facts(columns, values, key), strict=True):
            if columns.group is not None:
                groups[name] = _group(columns.group, values)
            if kind != "pairs" and name in images:
                raise DataError(f"{values.where}: repeats the image {name!r} of an earlier row. List each image once.")
            images.setdefault(name, []).append(fact)
    if not images and columns.split is not None:
        values = dict.fromkeys(row.value(str(columns.split)) for row in rows)
        raise DataError(
            f"{path}: column {columns.split!r} has no row with {split!r}, got {', '.join(list(values)[:6])}. Rename "
            "the splits in the table to train and test, or set the split of the task to one of the values found."
        )
    # All pairs of an image are one annotation, so it is encoded once.
    facts = [[*chain(*found)] if kind == "pairs" else found[0] for found in images.values()]
    kind_of_set = MaskTableSet if kind == "masks" else TableSet
    table_set = kind_of_set(root, list(images), facts, kind, sha256(text).encode())
    table_set.classes, table_set.groups = classes, [groups[name] for name in images] if groups else None
    return table_set


logger = logging.getLogger(__name__)


class TableSet(FileSet):
    """Images of a table.

    Attributes:
        classes: names of the classes, in the order of their numbers; empty if the table has numbers.
    """

    shares_images = True
    classes: Sequence[str] = ()

    def own_classnames(self) -> list[str]:
        return list(self.classes)


class MaskTableSet(MaskedFiles, TableSet):
    """Images of a table with label images."""


def _test_units(columns: TableColumns, rows: Sequence[TableRow]) -> set[str]:
    """Return the groups (or images) of the split test: the first ones in the order of a hash, at least one and not all."""
    if columns.test_share is None:
        return set()
    units = sorted({_unit(columns, row) for row in rows}, key=lambda unit: hashlib.blake2b(unit.encode()).digest())
    return set(units[: min(max(1, round(columns.test_share * len(units))), len(units) - 1)])


def _unit(columns: TableColumns, row: TableRow) -> str:
    return row.fill(columns.images[0]) if columns.group is None else _group(columns.group, row)


def _group(column: str, row: TableRow) -> str:
    """Return the group of a row. Raises `DataError` for an empty cell, because all such rows would be one group."""
    if not (name := row.value(column)):
        raise DataError(f"{row.where}: column {column!r} has no group. Fill in the cell, or remove the row.")
    return name


def _refuse_similar_splits(path: Path, columns: TableColumns, rows: Sequence[TableRow]) -> None:
    """Raise `DataError` for splits that differ in case only, whose rows would silently not be used."""
    names: dict[str, str] = {}
    for row in rows if columns.split is not None else ():
        name = row.value(str(columns.split))
        if names.setdefault(name.casefold(), name) != name:
            raise DataError(
                f"{path}: column {columns.split!r} spells one split in two ways, got {names[name.casefold()]!r} and "
                f"{name!r}. Use one spelling."
            )


def _class_names(
    path: Path, rows: Sequence[TableRow], columns: TableColumns, kind: FactKind, numbered: bool
) -> list[str]:
    """Return the classes of all rows, whatever their split, in the order of `class_order`.

    `numbered`: numbers are those of class names elsewhere; then empty if all classes are numbers.
    """
    if kind == "labels":
        return _warn_of_similar(path, class_order({name for row in rows for name in row.names(str(columns.labels))}))
    if kind not in ("label", "metadata") or columns.label is None:
        return []
    texts = {row.class_text(columns.label) for row in rows}
    if len(written := {row.fill(columns.label).strip() for row in rows}) > len(texts):
        class_order(name for name in written if name.isdecimal())  # refuses 7 and 007
    return [] if numbered and all(map(is_whole_number, texts)) else _warn_of_similar(path, class_order(texts))


def _warn_of_similar(path: Path, classes: list[str]) -> list[str]:
    """Return the classes; warn if two differ only in case, spaces or the form of a number (1 and 1.0), or if names look like lists."""
    forms: dict[str, str] = {}
    for name in classes:
        form = " ".join(name.casefold().split())
        form = form.removesuffix(".0") if form.removesuffix(".0").lstrip("-").isdecimal() else form
        if forms.setdefault(form, name) != name:
            warn_once(
                logger,
                f"{path}: {forms[form]!r} and {name!r} are different classes. If they are meant to be one class, write them "
                "in the same way.",
            )
            break
    parts = {part.strip() for name in classes for part in name.split(",")}
    if len(parts) < len(classes):
        warn_once(
            logger,
            f"{path}: class names such as {max(classes, key=len)!r} look like lists. Separate the names of a cell by semicolons.",
        )
    return classes


def _one_image(columns: TableColumns, task: str) -> None:
    if len(columns.images) != 1:
        raise ConfigError(f"columns.images: task {task} takes one image per row, got {len(columns.images)}")


def _label_facts(columns: TableColumns, row: TableRow, _key: str) -> list[int]:
    _one_image(columns, "zeroshot")
    if columns.label is None:
        raise ConfigError("columns.label: missing, and the task needs the class of each image")
    return [row.label(columns.label)]


def _metadata_facts(group_by: str, columns: TableColumns, row: TableRow, key: str) -> list[list[int | str]]:
    """Return the class of an image, and the group that the task's `group_by` names."""
    return [[*_label_facts(columns, row, key), row.value(group_by)]]


def _labels_facts(columns: TableColumns, row: TableRow, _key: str) -> list[list[int]]:
    _one_image(columns, "probe")
    names = set(row.names(str(columns.labels)))
    return [[int(name in names) for name in row.classes]]


def _target_facts(columns: TableColumns, row: TableRow, _key: str) -> list[float]:
    _one_image(columns, "regression")
    if columns.target is None:
        raise ConfigError("columns.target: missing, and the task needs a number for each image. Name the column.")
    return [row.number(columns.target)]


def _mask_facts(columns: TableColumns, row: TableRow, _key: str) -> list[str]:
    _one_image(columns, "linear_segmentation")
    if columns.mask is None:
        raise ConfigError(
            "columns.mask: is missing, but the task needs a mask for each image. Name the column of mask files."
        )
    return [row.fill(columns.mask)]


def _caption_facts(columns: TableColumns, row: TableRow, _key: str) -> list[list[str]]:
    _one_image(columns, "retrieval")
    return [[text for template in columns.captions for text in row.texts(template) if text.strip()]]


def _pair_facts(columns: TableColumns, row: TableRow, key: str) -> list[list[Pair]]:
    _one_image(columns, "pairs")
    if not columns.captions or not columns.false_captions:
        raise ConfigError("columns: task `pairs` needs captions and false_captions")
    kind = row.fill(columns.kind)
    both = zip(columns.captions, columns.false_captions, strict=True)
    return [[Pair(kind, row.fill(true), row.fill(false), key) for true, false in both]]


_FACTS: dict[FactKind, Callable[[TableColumns, TableRow, str], Sequence[Any]]] = {
    "label": _label_facts,
    "labels": _labels_facts,
    "target": _target_facts,
    "masks": _mask_facts,
    "captions": _caption_facts,
    "pairs": _pair_facts,
}


TABLE = Layout((*_FACTS, "metadata", "questions"), open_table)
