"""Tables (CSV, TSV) of image paths or URLs with captions, as open_clip's csv data sets."""

from __future__ import annotations

import csv
import hashlib
import itertools
import shlex
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ...core.config import field, resumable_field
from ...core.errors import BadSampleError, DataError
from ...core.files import whole_file
from ..decode.decoding import suffixes
from ..servers.remote import open_filesystem, remedy, with_retries, without_credentials
from ..sources.base import SourceKind, Storage, dotted_key
from .columns import Columns, RowsConfig, choose_columns, row_members, split_column, warn_of_several_splits

IMAGE_COLUMNS = ("filepath", "image", "image_path", "img", "file_name", "filename", "file", "path")
_MAX_CELL = 1 << 24  # characters; an unclosed quotation mark is noticed before the rest of a large table is in memory
_END_MARKER = "\x1e\x1d\x1e"  # a sentinel after the last line, which no table contains
_PART = 1000


class TableConfig(RowsConfig):
    """A table with one row per image and caption. Paths are relative to the table."""

    kind: Literal["table"] = field("table", "Format of the data: an entry of sparo.sources.")
    table: str = resumable_field(..., "File whose first line names the columns (.csv, .tsv).", examples=["photos.csv"])
    image_keys: tuple[str, ...] = field(
        (*IMAGE_COLUMNS, "url", "image_url"), "Columns of image paths or URLs. The first one that exists is used."
    )
    separator: str | None = field(
        None, "Column separator. Default: detected in the first line.", examples=[";"], min_length=1, max_length=1
    )
    url_cache: str | None = resumable_field(
        None,
        "Folder that images given by URL are downloaded to when they are first read. Required for URLs.",
        examples=["downloads"],
    )


def read_table(
    table: Path,
    choose: Callable[[list[str]], Sequence[str]],
    image_columns: Iterable[str],
    separator: str | None,
    checked: int | None = None,
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line that each row ends in, and the cells of the chosen columns, any of them possibly empty.

    Args:
        table: the file.
        choose: returns the columns to read, among those of the first line.
        image_columns: usual names of the image column, by which the separator is detected.
        checked: number of chosen columns, from the first, that are searched for parts of other rows; None: all.
        separator: between columns; None: tab, comma or semicolon, whichever makes the image column a column.

    Raises:
        DataError: an empty table, UTF-16, a row with too many columns, or a quote that is never closed.
        UnicodeDecodeError: the table is not UTF-8.
    """
    _refuse_utf16(table)
    with table.open(newline="", encoding="utf-8-sig") as stream:
        # A comma within a caption must not determine the separator.
        delimiter = separator or _detect_delimiter(stream.readline(), image_columns)
        stream.seek(0)
        # A quote that is never closed turns everything after it into one caption, including the sentinel.
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
        reader = csv.DictReader(itertools.chain(stream, [_END_MARKER]), delimiter=delimiter)
        if (reader.fieldnames or [_END_MARKER])[0] == _END_MARKER:
            raise DataError(f"{table}: is empty. Its first line must name the columns.")
        header = list(reader.fieldnames or ())
        columns = choose(header)
        for column in columns:
            if header.count(column) > 1:
                raise DataError(
                    f"{table}: has {header.count(column)} columns named {column!r}. Rename all but one of them."
                )
        split, splits, begin = split_column(header), set[str](), 2
        try:
            for row in reader:
                # A row with more columns than the header has a list here.
                cells = [cell or "" for cell in row.values() if not isinstance(cell, list)]
                if cells[0] == _END_MARKER:
                    return
                if any(_END_MARKER in cell for cell in cells):
                    raise csv.Error("a quote is opened and never closed")
                if None in row:  # DictReader's key for extra columns, which are most likely the rest of a caption
                    raise DataError(
                        f"{table}, line {reader.line_num}: has more columns than the header. Quote captions that contain {delimiter!r}."
                    )
                cells = [row[column] or "" for column in columns]
                several = [(c, cell) for c, cell in zip(columns[:checked], cells, strict=False) if "\n" in cell]
                if any(_contains_rows(cell, delimiter, header, columns[0], column) for column, cell in several):
                    raise csv.Error("a quotation mark joins several rows into one cell")
                # Two are enough for a warning, so that a column of another meaning does not fill the memory.
                if split and len(splits) < 2 and row[split]:
                    splits.add(row[split].strip())
                    warn_of_several_splits(str(table), split, splits)
                yield reader.line_num, cells
                begin = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{table}, line {begin}: {error}. If a quotation mark has no closing mark, remove it, or write it "
                'twice ("").'
            ) from None


def _contains_rows(cell: str, delimiter: str, header: list[str], image_column: str, column: str) -> bool:
    """Return whether a cell of several lines contains parts of other rows, because a quotation mark was not closed in its row.

    Then an image is where a row has it: in the first line, which begins with this column, in whole rows, or in the last
    line, which ends with this column.
    """
    lines = [line.split(delimiter) for line in cell.split("\n")]
    if delimiter == "\t" and any(len(line) > 1 for line in lines):
        return True
    place, own = header.index(image_column), header.index(column)
    for number, line in enumerate(lines):
        begin = own if number == 0 else 0
        end = own + 1 if number == len(lines) - 1 else len(header)
        at = place - begin
        is_part = at > 0 if number == 0 else place < end
        if is_part and len(line) >= end - begin and Path(line[at].strip().strip('"')).suffix.lower() in suffixes():
            return True
    return False


def _refuse_utf16(table: Path) -> None:
    """Raise `DataError` for a table in UTF-16, as exported by spreadsheets."""
    with table.open("rb") as stream:
        head = stream.read(1024)
    # Half of the bytes of ASCII characters are zeros. A single zero may be part of a caption.
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or 4 * head.count(b"\0") > len(head):
        quoted = shlex.quote(str(table))
        raise DataError(f"{table}: is UTF-16, not UTF-8. Convert it with: iconv -f utf-16 -t utf-8 {quoted} > utf8.csv")


def _detect_delimiter(header: str, columns: Iterable[str]) -> str:
    names = {s: {name.strip().strip('"').lower() for name in header.rstrip("\r\n").split(s)} for s in ("\t", ",", ";")}
    # Decide by the names of the header, because a title may contain any of the three characters.
    return next((s for s, header_names in names.items() if header_names & set(columns)), ",")


class _Cells:
    """A column as one block of bytes, which forked workers share: Python strings would be copied into each of them."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), array("q", [0])

    def append(self, cell: str) -> None:
        self._text += cell.encode("utf-8")
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> str:
        return self._text[self._ends[row] : self._ends[row + 1]].decode("utf-8")

    def part(self, begin: int, end: int) -> _Cells:
        """Return a copy of some rows."""
        copy, first = _Cells(), self._ends[begin]
        copy._text = self._text[first : self._ends[end]]
        copy._ends = array("q", (at - first for at in self._ends[begin : end + 1]))
        return copy

    def digest(self, begin: int, end: int) -> bytes:
        return hashlib.sha256(
            self._text[self._ends[begin] : self._ends[end]] + self._ends[begin:end].tobytes()
        ).digest()


class TablePart(Storage):
    """Some rows of a table, which the plan treats as a shard."""

    def __init__(self, table: Path, columns: Columns, cells: dict[str, _Cells], rows: range, url_cache: Path | None):
        self.url, self._table, self._columns, self._cells = f"{table}#{rows.start // _PART}", table, columns, cells
        self._rows, self._first, self._url_cache = rows, rows.start, url_cache

    def __len__(self) -> int:
        return len(self._rows)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: these rows instead of the whole table."""
        cells = {name: c.part(self._rows.start, self._rows.stop) for name, c in self._cells.items()}
        return {**self.__dict__, "_cells": cells, "_rows": range(len(self))}

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        label, number = self._first + number, self._rows[number]
        row: dict[str, object] = {name: cells[number] for name, cells in self._cells.items()}
        place = str(row[self._columns.image]).strip()
        try:
            scheme, mark, rest = place.partition("://")
            if mark:
                row[self._columns.image] = self._download(f"{scheme.lower()}://{rest}")
            return f"{label:09d}", row_members(self._columns, row, self._table.parent)
        except BadSampleError as bad:
            bad.key = f"row {label + 1}: {without_credentials(place)}"
            raise

    def digest(self) -> str:
        begin, end = self._rows.start, self._rows.stop
        parts = [self._cells[name].digest(begin, end) for name in sorted(self._cells)]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def _download(self, url: str) -> bytes:
        """Return an image from the cache, or from its server. Raises `BadSampleError`."""
        shown = without_credentials(url)
        if self._url_cache is None:
            raise DataError(
                f"{self._table}: contains URLs of images, such as {shown}. Set url_cache or the option --url-cache to a folder for the downloads."
            )
        name = hashlib.sha256(url.encode()).hexdigest()
        file = self._url_cache / name[:2] / name
        if file.is_file():
            return file.read_bytes()
        try:
            filesystem, path = open_filesystem(url)
            data = with_retries(shown, lambda: filesystem.cat_file(path))
        except DataError as error:
            raise BadSampleError("image not downloaded", detail=str(error)[:200]) from None
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            temporary.write_bytes(data)
        return data


def _open_table(config: TableConfig, key: str, _write_index: bool) -> list[TablePart]:
    """Read the table, whose image and caption columns are kept in memory."""
    table = Path(config.table)
    if "://" in config.table:
        raise DataError(
            f"{dotted_key(key, 'table')}: expected a local file, got {config.table}. Copy the table to a disk; URLs in its image column are allowed."
        )
    if not table.is_file():
        raise DataError(f"{dotted_key(key, 'table')}: {table} is not a file{remedy(table)}")
    found: list[Columns] = []

    def choose(header: list[str]) -> list[str]:
        columns = choose_columns(header, config, str(table))
        found.append(columns)
        cells.update({name: _Cells() for name in (columns.image, *columns.others.values())})
        return list(cells)

    cells: dict[str, _Cells] = {}
    try:
        for _, row in read_table(table, choose, config.image_keys, config.separator):
            for column, cell in zip(cells.values(), row, strict=True):
                column.append(cell)
    except UnicodeDecodeError as error:
        raise DataError(f"{table}: not UTF-8 ({error}). Convert it, e.g. with iconv -f latin1 -t utf-8.") from None
    (columns,) = found
    rows, cache = len(cells[columns.image]), Path(config.url_cache) if config.url_cache else None
    return [
        TablePart(table, columns, cells, range(begin, min(begin + _PART, rows)), cache)
        for begin in range(0, rows, _PART)
    ]


SOURCE = SourceKind(TableConfig, _open_table)
