"""Questions in a table (CSV, JSON, Parquet): one row, or several consecutive rows, have the images and texts of a question."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import is_safe_relative_path, read_bytes, read_text

from .base import Fact, stat_files
from .pictures import decode_image
from .questions import ImageRef, Item, QuestionSet
from .table_rows import TableRow, table_rows
from .task_config import TableColumns

_EMBEDDED = re.compile(r"(.+\.parquet)#(\d+)#(.+)")  # file, row and column of an image in a Parquet file


def open_questions(root: Path, columns: TableColumns, split: str) -> QuestionSet:
    """Open the questions that `columns` describes.

    Raises:
        ConfigError: the columns do not describe a question, or pyarrow is missing.
        DataError: no such file, or a row lacks a column.
    """
    if not columns.captions:
        raise ConfigError("columns.captions: missing, but questions need captions. Name the columns that contain them.")
    paths = _files(root, columns.file)
    rows = [row for path in paths for row in _iter_rows(root, path, len(paths) > 1)]
    if columns.split is not None:
        values = dict.fromkeys(row.value(columns.split) for row in rows)
        rows = [row for row in rows if row.value(columns.split) == split]
        if values and not rows:
            raise DataError(
                f"{paths[0]}: column {columns.split!r} has no row with {split!r}, got {', '.join(list(values)[:6])}. Set "
                "the task's key `split` to one of these values."
            )
    size = columns.rows
    if len(rows) % size:
        raise DataError(
            f"{paths[-1]}: the number of rows must be a multiple of columns.rows={size}, got {len(rows)}. "
            "Remove the incomplete question."
        )
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    items = [_item(root, columns, group, number) for number, group in enumerate(groups)]
    embedded = any(_EMBEDDED.fullmatch(ref.name) for item in items for ref in item.images)
    if columns.skip_missing and not embedded:
        return present_questions(root, items, paths[0])
    return (ParquetQuestionSet if embedded else QuestionSet)(root, items, paths[0])


def present_questions(root: Path, items: Sequence[Item], where: object) -> QuestionSet:
    """Return the questions whose images exist, for sets whose images are links; the number of others is reported with the score."""
    exists = {ref.name: (root / ref.name).is_file() for item in items for ref in item.images}
    kept = [item for item in items if all(exists[ref.name] for ref in item.images)]
    if items and not kept:
        missing = next(name for name, found in exists.items() if not found)
        raise DataError(
            f"{root}: no question has all its image files; for example, {missing} is missing. Fetch the images."
        )
    question_set = QuestionSet(root, kept, where)
    question_set.skipped = len(items) - len(kept)
    return question_set


def find_image(root: Path, columns: TableColumns, name: str) -> str:
    """Return an image's path below root, in the first of `columns.folders` that contains it."""
    for folder in columns.folders if is_safe_relative_path(name) else ():
        if (root / folder / name).is_file():
            return f"{folder}/{name}"
    return f"{columns.folders[0]}/{name}" if columns.folders else name


def _files(root: Path, pattern: str) -> list[Path]:
    if not re.search(r"[*?\[]", pattern):
        return [root / pattern]
    if paths := sorted(root.glob(pattern)):
        return paths
    raise DataError(f"{root / pattern}: no such file. Fetch the set again, or correct columns.file.")


def _iter_rows(root: Path, path: Path, several: bool) -> Iterator[TableRow]:
    """Yield the rows of a file; if there are several files, `file_stem` is a column, too."""
    if path.suffix == ".parquet":
        rows: Iterator[Mapping[str, Any]] = _parquet_rows(path, path.relative_to(root).as_posix())
    else:
        rows = table_rows(read_text(path, DataError), path)
    for number, row in enumerate(rows):
        yield TableRow({"file_stem": path.stem, **row} if several else row, f"{path}: row {number + 1}")


def _item(root: Path, columns: TableColumns, rows: Sequence[TableRow], number: int) -> Item:
    boxes = [row.box(columns.box) if columns.box else None for row in rows]
    images = [
        ImageRef(find_image(root, columns, name), box)
        for row, box in zip(rows, boxes, strict=True)
        for t in columns.images
        for name in row.texts(t)
    ]
    texts = [text for row in rows for template in columns.captions for text in row.texts(template)]
    first = rows[0]
    answer = first.whole_number(columns.answer) if columns.answer else 0
    key = str(number) if columns.key is None else first.value(columns.key)
    groups = (("all_of_group", first.fill(columns.group)),) if columns.group else ()
    return Item(tuple(images), tuple(texts), first.fill(columns.kind), key, answer, groups)


class ParquetQuestionSet(QuestionSet):
    """Questions whose images are in Parquet files, as Hugging Face writes them; an image is named FILE#ROW#COLUMN."""

    def __init__(self, root: Path, items: Sequence[Item], where: object):
        super().__init__(root, items, where)
        # The files that contain the images, and images in files of their own.
        self._paths = sorted({match[1] if (match := _EMBEDDED.fullmatch(name)) else name for name in self._names})

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        name = self._names[number]
        match = _EMBEDDED.fullmatch(name)
        if match is None:
            return super().read(number)
        data = embedded_image(self.root / match[1], int(match[2]), match[3])
        image = decode_image(data, self.root / name, own=not self.published)
        return self._key(number), self._crop(number, image), self._facts[number]

    def _content_digest(self, number: int) -> bytes:
        match = _EMBEDDED.fullmatch(self._names[number])
        if match is None:
            return super()._content_digest(number)
        return xxhash.xxh3_128_digest(embedded_image(self.root / match[1], int(match[2]), match[3]))

    @cached_property
    def _stat(self) -> tuple[bytes, bytes]:
        return stat_files([self.root / name for name in self._paths])


def _parquet_rows(path: Path, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a Parquet file without the images, which are replaced by FILE#ROW#COLUMN."""
    file = _parquet(path)
    images = [field.name for field in file.schema_arrow if _is_image(field.type)]
    others = [column for column in file.schema_arrow.names if column not in images]
    number = 0
    for group in range(file.num_row_groups):
        table = _read_group(path, group, others)
        for row in _readable(path, table.to_pylist) or [{}] * table.num_rows:
            yield {**row, **{column: f"{name}#{number}#{column}" for column in images}}
            number += 1


def _is_image(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return binary or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def embedded_image(path: Path, row: int, column: str) -> bytes:
    """Return the bytes of an image in a Parquet file. Raises `DataError` if there is none."""
    metadata, first = _parquet(path).metadata, 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        if row < first + count:
            cells = _column(path, _stamp(path), group, column)
            value = _readable(path, lambda: cells[row - first].as_py())  # noqa: B023  called at once
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, dict):
                name = value.get("path")
                value = value.get("bytes")
                if value is None and isinstance(name, str) and is_safe_relative_path(name):
                    return read_bytes(path.parent / name, DataError)
            if not isinstance(value, bytes):
                kind, remedy = "no image", "Remove the row, or name another column."
                if isinstance(value, list) and value:
                    kind, remedy = f"{len(value)} images", "Store each image of a row in a separate column."
                raise DataError(
                    f"{path}: row {row + 1}: column {column} must contain one image per row, got {kind}. {remedy}"
                )
            return value
        first += count
    raise DataError(f"{path}: has no row {row + 1}. Fetch the file again.")


@lru_cache(2)
def _column(path: Path, _stamp: tuple[int, int], group: int, column: str) -> Any:
    """Return a column of a row group as Arrow's array, which copies no image; images are read in order, so the last groups suffice."""
    return _read_group(path, group, [column]).column(column)


def _read_group(path: Path, group: int, columns: Sequence[str]) -> Any:
    # Without threads, which do not survive the fork of a worker.
    return _readable(path, lambda: _parquet(path).read_row_group(group, columns=list(columns), use_threads=False))


def _parquet(path: Path) -> Any:
    return _open_parquet(path, _stamp(path), os.getpid())


@lru_cache(4)
def _open_parquet(path: Path, _stamp: tuple[int, int], _process: int) -> Any:
    """Open a Parquet file, again in every process (handles do not survive a fork) and after a change."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{path}: Parquet needs pyarrow. pip install -e '.[parquet]' in sparo's checkout") from None
    return _readable(path, lambda: pq.ParquetFile(path))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        raise DataError(f"{path}: no such file. Fetch the set again, or correct columns.file.") from None
    return stat.st_mtime_ns, stat.st_size


def _readable(path: Path, read: Callable[[], Any]) -> Any:
    """Return `read()`. Raises `DataError` for any error of a damaged file; pyarrow raises many kinds."""
    try:
        return read()
    except DataError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:200]
        raise DataError(f"{path}: is not readable as Parquet ({text}). Copy the file again.") from None
