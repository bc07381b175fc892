"""Parquet files with image bytes, as img2dataset and the Hugging Face hub write them. A row group is read as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ...core.config import field, resumable_field
from ...core.errors import BadSampleError, ConfigError, DataError
from ..servers.remote import find_shards, open_filesystem, refuse_several_splits, with_retries
from ..sources.base import SourceKind, dotted_key
from .columns import (
    Columns,
    RowsConfig,
    choose_columns,
    choose_sampled,
    row_members,
    split_column,
    warn_of_several_splits,
)
from .groups import Group, process_groups

_SAMPLED_ROWS = 256  # of a row group, for the fingerprint


class ParquetConfig(RowsConfig):
    """Parquet files with a column of image files (bytes, or Hugging Face's struct of bytes and path)."""

    kind: Literal["parquet"] = field("parquet", "Format of the data: an entry of sparo.sources.")
    parquet: str | tuple[str, ...] = resumable_field(
        ..., "Folder, glob, brace range, fsspec URL, or a list of these.", examples=["data/{00000..00099}.parquet"]
    )


class RowGroup(Group):
    """A row group of a Parquet file, which the plan treats as a shard."""

    def __init__(self, url: str, group: int, metadata: Any, columns: Columns):
        self.url, self._file, self._group, self._length = f"{url}#{group}", url, group, metadata.num_rows
        self._columns, self._names = columns, list(dict.fromkeys([columns.image, *columns.others.values()]))
        self.row_bytes = -(-metadata.total_byte_size // max(1, metadata.num_rows))
        facts = [metadata.num_rows, *(_column_facts(metadata.column(i)) for i in range(metadata.num_columns))]
        self.is_sampled, self.caption_columns = False, list[str]()
        self._digest = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        row = process_groups().row(self, number)
        try:
            file = Path(self._file)
            return f"{file.parent.name}/{file.stem}-{self._group:04d}-{number:06d}", row_members(
                self._columns, row, _parent_folder(self._file)
            )
        except BadSampleError as bad:
            bad.key = f"row {number} of group {self._group}"
            raise

    def select_columns(self, keys: Iterable[str | None]) -> list[str]:
        """Return the columns that have these keys as members of a sample."""
        return [column for key in keys if key and (column := self._columns.others.get(key))]

    def digest(self) -> str:
        return self._digest

    def row_sample(self) -> str:
        # Captions only: sizes and statistics do not show a change of captions of equal length.
        if not self.is_sampled or not self.caption_columns:
            return ""
        captions = self._read(self.caption_columns)
        rows = captions.take(list(range(0, len(captions), max(1, len(captions) // _SAMPLED_ROWS)))).to_pylist()
        return hashlib.sha256(str(rows).encode(errors="surrogatepass")).hexdigest()[:16]

    def table(self) -> Any:
        return self._read(self._names)

    def _read(self, names: list[str]) -> Any:
        import pyarrow.parquet as pq

        def read() -> Any:
            # Without the read-ahead of fsspec, which fetches blocks of 5 MB that belong to other columns and groups.
            filesystem, path = open_filesystem(self._file)
            try:
                with filesystem.open(path, "rb", cache_type="none") as stream, pq.ParquetFile(stream) as file:
                    return file.read_row_group(self._group, columns=names, use_threads=False)
            except Exception as error:
                raise _unreadable(self._file, error) from None

        return with_retries(self._file, read)


def _column_facts(column: Any) -> str:
    """Return sizes, positions and statistics of a column of a row group, which change with nearly any change of the content."""
    try:
        return str(column.to_dict())
    except ValueError:  # statistics of text that is not UTF-8
        return f"{column.path_in_schema} {column.data_page_offset} {column.total_compressed_size}"


def _parent_folder(file: str) -> Path | None:
    return None if "://" in file else Path(file).parent


def _unreadable(url: str, error: Exception) -> Exception:
    """Return `DataError` for damage that pyarrow found, and any other error itself, because a server may recover."""
    import pyarrow as pa

    if isinstance(error, pa.ArrowException | UnicodeDecodeError) or (
        isinstance(error, OSError) and error.errno is None
    ):
        first = (str(error).splitlines() or [""])[0][:200]
        return DataError(f"{url}: is not readable as Parquet ({first}). Copy the file again, or remove it.")
    return error


def _open_file(url: str, config: ParquetConfig, splits: set[tuple[str, Any]]) -> list[RowGroup]:
    """Return the row groups of a file, from its footer, and add its column of splits with two of its values to `splits`."""
    import pyarrow.parquet as pq

    def footer() -> tuple[Any, list[str]]:
        filesystem, path = open_filesystem(url)
        try:
            with filesystem.open(path, "rb", cache_type="none") as stream, pq.ParquetFile(stream) as file:
                return file.metadata, file.schema_arrow.names
        except Exception as error:
            raise _unreadable(url, error) from None

    metadata, names = with_retries(url, footer)
    columns = choose_columns(names, config, url)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if split := split_column(names):
        parts = [group.column(i) for group in groups for i in range(group.num_columns)]
        known = [part.statistics for part in parts if part.path_in_schema == split and part.is_stats_set]
        splits.update((split, end) for part in known if part.has_min_max for end in (part.min, part.max))
    return [RowGroup(url, number, group, columns) for number, group in enumerate(groups) if group.num_rows]


def _open_parquet(config: ParquetConfig, key: str, _write_index: bool) -> list[RowGroup]:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{key or 'parquet'}: Parquet needs pyarrow. pip install -e '.[parquet]' in sparo's checkout"
        ) from None
    urls = find_shards(config.parquet, dotted_key(key, "parquet"), ".parquet")
    refuse_several_splits(config.parquet, urls, dotted_key(key, "parquet"), ".parquet")
    splits: set[tuple[str, Any]] = set()
    with ThreadPoolExecutor(32 if any("://" in url for url in urls) else 8) as pool:
        opened = [group for groups in pool.map(lambda url: _open_file(url, config, splits), urls) for group in groups]
    for column in {column for column, _ in splits}:
        warn_of_several_splits(dotted_key(key, "parquet"), column, [value for _, value in splits])
    choose_sampled(opened)
    for group in opened:
        group.caption_columns = group.select_columns(config.captions or (config.caption_key,))
    return opened


SOURCE = SourceKind(ParquetConfig, _open_parquet)
