"""Rows of a table of images: CSV, TSV, JSON or JSON lines, and templates that are filled in with their values."""

from __future__ import annotations

import ast
import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import Any

from sparo_train.core.errors import BadSampleError, ConfigError, DataError, did_you_mean
from sparo_train.core.files import parse_json
from sparo_train.data.examples.samples import parse_list

_MAX_PIXELS = 1 << 20  # of a coordinate of a region


def is_whole_number(text: str) -> bool:
    """Return whether a class is a number from 0, also in the forms 3.0 (of a column with empty cells in pandas) and +3."""
    return re.fullmatch(r"\+?[0-9]+(\.0*)?", text) is not None


def whole_number(text: str) -> int:
    """Return the number of a text for which `is_whole_number` holds."""
    return int(text.partition(".")[0])


def table_rows(text: str, path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table as mappings from columns to values; a list has the columns item_0, item_1 and so on.

    Raises:
        DataError: a row is incomplete, or the text has another format.
        ConfigError: the file name has an unknown ending.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        header = text.partition("\n")[0]
        # Spreadsheets of several languages write semicolons.
        comma = ";" if ";" in header and "," not in header else ","
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # lists of captions may be long
        # Not `splitlines`, which also splits at line separators within a text.
        lines = io.StringIO(text, newline="")
        reader = csv.DictReader(lines, delimiter="\t" if suffix == ".tsv" else comma, strict=True)
        try:
            repeated = [name for name, count in Counter(filter(None, reader.fieldnames or ())).items() if count > 1]
            if repeated:
                raise DataError(f"{path}: has several columns named {repeated[0]!r}. Rename all but one of them.")
            for row in reader:
                if None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num}: has fewer columns than the header. Add the missing cells."
                    )
                if None in row:
                    raise DataError(
                        f"{path}, line {reader.line_num}: has more columns than the header. Put texts that contain the separator in quotation marks."
                    )
                yield row
        except csv.Error as error:
            raise DataError(
                f"{path}, line {reader.line_num}: {error}. Add the closing quotation mark; a mark that belongs to the text must be "
                'written twice ("").'
            ) from None
        return
    if suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield parse_json(line, f"{path}, line {number}", dict, DataError)
        return
    if suffix != ".json":
        raise ConfigError(f"columns.file: expected .csv, .tsv, .json or .jsonl, got {path.name}. Convert the table.")
    content = parse_json(text, str(path), list if text.lstrip()[:1] == "[" else dict, DataError)
    for row in content if isinstance(content, list) else content.values():
        if not isinstance(row, dict | list):
            raise DataError(f"{path}: expected an object or a list per row, got {type(row).__name__}. Fetch it again.")
        yield row if isinstance(row, dict) else {f"item_{i}": value for i, value in enumerate(row)}


class TableRow:
    """Values of a row, in the form that templates take."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where
        self.classes: Sequence[str] = ()

    def fill(self, template: str) -> str:
        """Return the template with the row's values. Raises `DataError` for a column that the row lacks."""
        # Directly, because a dot in a column's name is not one of an attribute.
        # A table that pandas wrote may have a column without a name, which is not that of a template of several columns.
        if (column := _single_column(template)) and column in self.values:
            return _plain(self.values[column])
        try:
            return template.format_map({name: _plain(value) for name, value in self.values.items()})
        except KeyError as missing:
            column = str(missing.args[0])
            raise DataError(f"{self.where}: no column {column!r}; {did_you_mean(column, self.values)}") from None
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"columns: {template!r} cannot be filled in ({error}). Write a column's name in braces, as in {{caption}}."
            ) from None

    def value(self, column: str) -> str:
        """Return the value of a column without spaces around it."""
        return self.fill(f"{{{column}}}").strip()

    def class_text(self, template: str) -> str:
        """Return the name or number of a class, without spaces around it or zeros before it."""
        text = self.fill(template).strip()
        return str(int(text)) if text.isdecimal() else text

    def label(self, template: str) -> int:
        """Return the number of the row's class."""
        text = self.class_text(template)
        if not text:
            raise DataError(f"{self.where}: has no class. Fill in the column, or remove the row.")
        return self.classes.index(text) if self.classes else whole_number(text)

    def names(self, template: str) -> list[str]:
        """Return the names of a cell, which are separated by semicolons or vertical bars, or a list, as JSON or Python write it."""
        if not isinstance(listed := self.values.get(_single_column(template)), list):
            listed = self._written_list(template) or re.split(r"[;|]", self.fill(template))
        return [name for text in listed if (name := str(text).strip())]

    def texts(self, template: str) -> list[str]:
        """Return the texts of a cell: the entries of a JSON list, of a Python list in `{column:list}`, otherwise the filled template."""
        column, _, how = _single_column(template).partition(":")
        listed = self.values.get(column)
        if not column and (inside := [name for name in _columns(template) if isinstance(self.values.get(name), list)]):
            if len(inside) > 1:
                raise ConfigError(f"columns: {template!r} contains several lists. Write one template for each list.")
            rows = (TableRow({**self.values, inside[0]: entry}, self.where) for entry in self.values[inside[0]])
            return [row.fill(template) for row in rows]
        if how == "list":
            try:
                listed = ast.literal_eval(str(listed))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                listed = None
            if not isinstance(listed, list | tuple):
                raise DataError(
                    f"{self.where}: the cell of {template} must contain a list, got {self.values.get(column)!r:.80}. Correct the cell."
                )
        if isinstance(listed, list | tuple):
            return [_plain(text) for text in listed]
        return self._written_list(template) or [self.fill(template)]

    def _written_list(self, template: str) -> list[str] | None:
        try:
            return parse_list(self.fill(template))
        except BadSampleError as error:
            raise DataError(
                f"{self.where}: {template} contains {error}, {error.detail}. Write the list in JSON."
            ) from None

    def box(self, template: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of a region, separated by commas."""
        listed = self.values.get(_single_column(template))
        texts = listed if isinstance(listed, list | tuple) else self.fill(template).strip("[]() ").split(",")
        try:
            left, top, width, height = (float(text) for text in texts)
        except (ValueError, TypeError):
            left = top = width = height = math.nan
        if not all(abs(value) <= _MAX_PIXELS for value in (left, top, width, height)):  # not true of NaN either
            raise DataError(
                f"{self.where}: columns.box: expected left, top, width and height in pixels, got {str(texts)[:80]}. Correct it."
            )
        return left, top, width, height

    def whole_number(self, template: str) -> int:
        """Return the whole number of a cell."""
        value = self.number(template)
        if value != int(value):
            raise DataError(f"{self.where}: {template} must be a whole number, got {value:g}. Correct it.")
        return int(value)

    def number(self, template: str) -> float:
        """Return the finite number of a cell."""
        text = self.fill(template)
        try:
            value = math.nan if "_" in text else float(text)  # Python reads 1_000 as a number
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(
                f"{self.where}: {template} must be a finite number, got {text!r}. Correct it, or remove the row."
            )
        return value


def _columns(template: str) -> list[str]:
    """Return the columns that a template names; empty for a malformed one, which `fill` reports."""
    try:
        return [name for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError:
        return []


def _single_column(template: str) -> str:
    """Return the column of a template that consists of one; empty for other templates."""
    return template[1:-1] if template[:1] == "{" and template[-1:] == "}" and template.count("{") == 1 else ""


class _Text(str):
    """A cell's text; `{column:name}` is the last part of a path or URL, `{column:top}` the first one."""

    def __format__(self, how: str) -> str:
        if how == "name":
            return PurePosixPath(self).name
        return self.partition("/")[0] if how == "top" else super().__format__(how)


def _plain(value: Any) -> str:
    # A string has no attributes that a template in a foreign file could access.
    return _Text("_".join(map(str, value)) if isinstance(value, list) else "" if value is None else value)
