"""Conversion of any data set to the formats of other libraries: rows of a key, an image, captions and JSON."""

from __future__ import annotations

import csv
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.files import whole_file
from sparo_train.data.examples.samples import image_bytes, list_captions
from sparo_train.data.sources.base import Source

from .captioned_sets import ConversionResult, replace_surrogates
from .convert_source import image_extension, other_facts
from .packed_files import write_litdata, write_mds

_ROWS = 256  # of a row group; training reads a row group as a whole
_FOLDER = 10_000  # images of a table per folder


class Row(NamedTuple):
    """One sample. `facts` is the JSON of its other columns, or empty."""

    key: str
    image: bytes
    captions: list[str]
    facts: str


def write_rows(source: Source, out: Path, to: str, per_file: int) -> ConversionResult:
    """Write a source in the format of another library. Unusable samples are counted and skipped.

    Args:
        source: the source.
        out: an empty folder, or a new one.
        to: parquet, dataset, mds, litdata or table.
        per_file: largest number of samples per file.

    Raises:
        ConfigError: the format's library is not installed.
        DataError: the folder is not empty, or the source has no usable sample.
    """
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: is not empty, and files of two data sets would mix. Name an empty folder.")
    skipped: Counter[str] = Counter()
    count = 0

    def rows() -> Iterator[Row]:
        nonlocal count
        for storage in source.storages:
            for number in range(len(storage)):
                try:
                    row = _row(*storage.read(number), source)
                except BadSampleError as bad:
                    skipped[str(bad)] += 1
                    continue
                count += 1
                yield row

    found = rows()
    if (first := next(found, None)) is None:
        raise DataError(
            f"{source.storages[0].url}: has no usable sample; skipped samples by reason: {dict(skipped)}. Check the "
            "data, and the caption key."
        )
    _WRITERS[to](out, itertools.chain([first], found), per_file)
    return ConversionResult(count, skipped=dict(skipped))


def _row(key: str, fields: dict[str, bytes], source: Source) -> Row:
    captions = list_captions(fields, source.config) if source.config.has_captions and source.config.caption_key else []
    image, facts = image_bytes(fields, source.config.image_keys), other_facts(fields)
    with suppress(ValueError, RecursionError, AttributeError):
        # The other captions of a sample that this project converted are in its `.json`.
        listed = json.loads(facts).get("captions")
        if isinstance(listed, list) and listed[:1] == captions:
            captions = [str(text) for text in listed]
    key = key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return Row(key, image, [replace_surrogates(caption) for caption in captions], replace_surrogates(facts))


def _columns(row: Row) -> dict[str, Any]:
    """Return a row of the formats whose columns may be lists."""
    return {"key": row.key, "image": row.image, "caption": row.captions, "json": row.facts or None}


def _write_parquet(out: Path, rows: Iterator[Row], per_file: int) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("--to parquet: needs pyarrow. pip install -e '.[parquet]' in sparo's checkout") from None
    schema = pa.schema(
        [("key", pa.string()), ("image", pa.binary()), ("caption", pa.list_(pa.string())), ("json", pa.string())]
    )
    for number in itertools.count():
        block = [_columns(row) for row in itertools.islice(rows, per_file)]
        if not block:
            return
        # Images are compressed already, and their statistics would be parts of them.
        with whole_file(out / f"{number:05d}.parquet") as temporary:
            table = pa.Table.from_pylist(block, schema)
            pq.write_table(table, temporary, row_group_size=_ROWS, compression="none", write_statistics=False)


def _write_dataset(out: Path, rows: Iterator[Row], per_file: int) -> None:
    try:
        import datasets
    except ImportError:
        raise ConfigError("--to dataset: needs datasets. pip install -e '.[datasets]' in sparo's checkout") from None
    text = datasets.Value("string")
    features = datasets.Features({"key": text, "image": datasets.Image(), "caption": [text], "json": text})
    out.parent.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    with TemporaryDirectory(prefix=".datasets-", dir=out.parent) as cache:

        def examples() -> Iterator[dict[str, Any]]:
            for row in rows:
                yield {**_columns(row), "image": {"bytes": row.image, "path": None}}

        # Otherwise, the library would hash the generator, and with it the source. Unique, because a run compares it to
        # notice changed data.
        whole: Any = datasets.Dataset.from_generator(
            examples, features=features, cache_dir=cache, fingerprint=uuid.uuid4().hex, writer_batch_size=_ROWS
        )
        whole.save_to_disk(out, num_shards=-(-len(whole) // per_file))


def _write_table(out: Path, rows: Iterator[Row], _per_file: int) -> None:
    """Write `table.tsv` with open_clip's columns, one row per caption, and the images."""
    with whole_file(out / "table.tsv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title", "key", "json"])
        for number, row in enumerate(rows):
            try:
                suffix = image_extension(row.image)
            except BadSampleError:  # counted where it is read, as in the other formats
                suffix = "bin"
            name = f"images/{number // _FOLDER:04d}/{number:09d}.{suffix}"
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(row.image)
            table.writerows([name, caption, row.key, row.facts] for caption in row.captions or [""])


def _packed_fields(rows: Iterator[Row]) -> Iterator[dict[str, str | bytes]]:
    """Yield the values of formats without lists. Further captions are in the JSON, as in shards."""
    for row in rows:
        facts = row.facts
        with suppress(ValueError, RecursionError):
            others: Any = json.loads(facts) if facts else {}
            if len(row.captions) > 1 and isinstance(others, dict):
                facts = json.dumps({"captions": row.captions, **others}, ensure_ascii=False)
        caption = row.captions[0] if row.captions else ""
        yield {"caption": caption, "image": row.image, "json": facts, "key": row.key}


_WRITERS: dict[str, Callable[[Path, Iterator[Row], int], None]] = {
    "parquet": _write_parquet,
    "dataset": _write_dataset,
    "mds": lambda out, rows, per_file: write_mds(out, _packed_fields(rows), per_file),
    "litdata": lambda out, rows, per_file: write_litdata(out, _packed_fields(rows), per_file),
    "table": _write_table,
}
