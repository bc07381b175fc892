"""Tables of images with captions, as open_clip's users have them: .csv and .tsv with a header."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError, did_you_mean

IMAGE_COLUMNS = ("filepath", "image", "image_path", "img", "file_name", "filename", "file", "path")
CAPTION_COLUMNS = ("title", "caption", "text", "txt", "sentence")
_END = "\x1e\x1d\x1e"  # a line behind the last one, which no table has


def table_rows(
    table: Path, image_column: str | None, caption_column: str | None, separator: str | None
) -> Iterator[tuple[int, str, str]]:
    """The line that each row ends in, its image and its caption, either of them perhaps empty.

    Args:
        image_column, caption_column: None: the first of `IMAGE_COLUMNS` and `CAPTION_COLUMNS` that the table has.
        separator: between columns; None: the one of tab, comma, semicolon that makes the image column a column.

    Raises:
        ConfigError: a separator of several characters.
        DataError: an empty table, a missing column, or a quote that is never closed.
    """
    if separator is not None and len(separator) != 1:
        raise ConfigError(f"--separator {separator}: is one character, as in --separator ';'")
    wanted = (
        (image_column,) if image_column else IMAGE_COLUMNS,
        (caption_column,) if caption_column else CAPTION_COLUMNS,
    )
    with table.open(newline="", encoding="utf-8-sig") as stream:
        # A comma within a caption must not decide what separates columns.
        delimiter = separator or _separator(stream.readline(), wanted[0])
        stream.seek(0)
        # A quote that is never closed takes all that follows for one caption, this last line of ours as well.
        reader = csv.DictReader(itertools.chain(stream, [_END]), delimiter=delimiter)
        if (reader.fieldnames or [_END])[0] == _END:
            raise DataError(f"{table}: is empty; its first line names the columns")
        image, caption = _columns(table, reader.fieldnames or (), wanted)
        begin = 2
        try:
            for row in reader:
                # A list is what a row has beyond the header's columns.
                cells = [cell or "" for cell in row.values() if not isinstance(cell, list)]
                if cells[0] == _END:
                    return
                if any(_END in cell for cell in cells):
                    raise csv.Error("a quote is opened and never closed")
                if None in row:  # DictReader's key for what lies beyond the header: the rest of a caption, most likely
                    raise DataError(
                        f"{table}, line {reader.line_num}: has more columns than the header; quote captions that hold {delimiter!r}"
                    )
                yield reader.line_num, row[image] or "", row[caption] or ""
                begin = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{table}, line {begin}: {error}; is a quote open? double it, or take it away") from None


def _columns(table: Path, known: Iterable[str], wanted: tuple[tuple[str, ...], ...]) -> list[str]:
    known, found = list(known), []
    for option, names in zip(("--image-column", "--caption-column"), wanted, strict=True):
        column = next((name for name in names if name in known), None)
        if column is not None and known.count(column) > 1:
            raise DataError(
                f"{table}: has {known.count(column)} columns {column!r}; {option} cannot tell which is meant"
            )
        if column is None:
            raise DataError(f"{table}: no column {names[0]!r}; {did_you_mean(names[0], known)}; {option} names another")
        found.append(column)
    return found


def _separator(header: str, columns: Iterable[str]) -> str:
    names = {s: {name.strip('"') for name in header.rstrip("\r\n").split(s)} for s in ("\t", ",", ";")}
    # By the header's own names: a title may hold any of the three signs.
    return next((s for s, found in names.items() if found & set(columns)), ",")
