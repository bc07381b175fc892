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
_END_MARKER = "\x1e\x1d\x1e"  # a line behind the last one, which no table has


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
    column_candidates = (
        (image_column,) if image_column else IMAGE_COLUMNS,
        (caption_column,) if caption_column else CAPTION_COLUMNS,
    )
    _refuse_utf16(table)
    with table.open(newline="", encoding="utf-8-sig") as stream:
        # A comma within a caption must not decide what separates columns.
        delimiter = separator or _detect_delimiter(stream.readline(), column_candidates[0])
        stream.seek(0)
        # A quote that is never closed takes all that follows for one caption, this last line of ours as well.
        reader = csv.DictReader(itertools.chain(stream, [_END_MARKER]), delimiter=delimiter)
        if (reader.fieldnames or [_END_MARKER])[0] == _END_MARKER:
            raise DataError(f"{table}: is empty; its first line names the columns")
        image, caption = _columns(table, reader.fieldnames or (), column_candidates)
        begin = 2
        try:
            for row in reader:
                # A list is what a row has beyond the header's columns.
                cells = [cell or "" for cell in row.values() if not isinstance(cell, list)]
                if cells[0] == _END_MARKER:
                    return
                if any(_END_MARKER in cell for cell in cells):
                    raise csv.Error("a quote is opened and never closed")
                if None in row:  # DictReader's key for what lies beyond the header: the rest of a caption, most likely
                    raise DataError(
                        f"{table}, line {reader.line_num}: has more columns than the header; quote captions that hold {delimiter!r}"
                    )
                yield reader.line_num, row[image] or "", row[caption] or ""
                begin = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{table}, line {begin}: {error}; is a quote open? double it, or take it away") from None


def _columns(table: Path, header: Iterable[str], column_candidates: tuple[tuple[str, ...], ...]) -> list[str]:
    header, columns = list(header), []
    for option, names in zip(("--image-column", "--caption-column"), column_candidates, strict=True):
        column = next((name for name in names if name in header), None) or _match_column(names, header)
        if column is not None and header.count(column) > 1:
            raise DataError(
                f"{table}: has {header.count(column)} columns {column!r}; {option} cannot tell which is meant"
            )
        if column is None:
            what, usual = ("the picture", "image") if option == "--image-column" else ("the caption", "caption")
            expected_name = next(iter(names)) if len(names) == 1 else usual
            raise DataError(
                f"{table}: no column for {what}, got the columns {', '.join(header)}. Call it {expected_name}, or name it with {option}; "
                f"{did_you_mean(expected_name, header)}"
            )
        columns.append(column)
    return columns


def _match_column(names: Iterable[str], header: Iterable[str]) -> str | None:
    """Return the column that is one of `names` but for capitals and spaces around it."""
    by_normalized_name = {name.strip().lower(): name for name in reversed(list(header))}
    return next((by_normalized_name[name] for name in names if name in by_normalized_name), None)


def _refuse_utf16(table: Path) -> None:
    """Raise `DataError` for a table in UTF-16, as spreadsheets export it."""
    with table.open("rb") as stream:
        head = stream.read(1024)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        quoted = shlex.quote(str(table))
        raise DataError(f"{table}: is UTF-16, not UTF-8. Convert it with: iconv -f utf-16 -t utf-8 {quoted} > utf8.csv")


def _detect_delimiter(header: str, columns: Iterable[str]) -> str:
    names = {s: {name.strip().strip('"').lower() for name in header.rstrip("\r\n").split(s)} for s in ("\t", ",", ";")}
    # By the header's own names: a title may hold any of the three signs.
    return next((s for s, header_names in names.items() if header_names & set(columns)), ",")
