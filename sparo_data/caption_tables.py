"""Tables of images with captions, as open_clip's users have them: .csv and .tsv with a header."""

from __future__ import annotations

import csv
import itertools
import shlex
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
    _refuse_utf16(table)
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
        column = next((name for name in names if name in known), None) or _alike(names, known)
        if column is not None and known.count(column) > 1:
            raise DataError(
                f"{table}: has {known.count(column)} columns {column!r}; {option} cannot tell which is meant"
            )
        if column is None:
            what, usual = ("the picture", "image") if option == "--image-column" else ("the caption", "caption")
            wanted_name = next(iter(names)) if len(names) == 1 else usual
            raise DataError(
                f"{table}: no column for {what}, got the columns {', '.join(known)}. Call it {wanted_name}, or name it with {option}; "
                f"{did_you_mean(wanted_name, known)}"
            )
        found.append(column)
    return found


def _alike(names: Iterable[str], known: Iterable[str]) -> str | None:
    """Return the column that is one of `names` but for capitals and spaces around it."""
    held = {name.strip().lower(): name for name in reversed(list(known))}
    return next((held[name] for name in names if name in held), None)


def _refuse_utf16(table: Path) -> None:
    """Raise `DataError` for a table in UTF-16, as spreadsheets export it."""
    with table.open("rb") as stream:
        head = stream.read(1024)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        quoted = shlex.quote(str(table))
        raise DataError(f"{table}: is UTF-16, not UTF-8. Convert it with: iconv -f utf-16 -t utf-8 {quoted} > utf8.csv")


def _separator(header: str, columns: Iterable[str]) -> str:
    names = {s: {name.strip().strip('"').lower() for name in header.rstrip("\r\n").split(s)} for s in ("\t", ",", ";")}
    # By the header's own names: a title may hold any of the three signs.
    return next((s for s, found in names.items() if found & set(columns)), ",")
