"""Conversion of a table with image paths and captions to shards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.errors import BadSampleError, ConfigError, DataError, did_you_mean
from sparo_train.data.decode.decoding import suffixes
from sparo_train.data.examples.samples import is_missing, parse_list
from sparo_train.data.rows.columns import CAPTION_COLUMNS
from sparo_train.data.rows.table import IMAGE_COLUMNS, read_table

from .captioned_sets import CaptionedImage, ConversionResult, Share, is_in_part, replace_surrogates, write_dataset
from .convert import apply_exif_orientation


def table_rows(
    table: Path, image_column: str | None, caption_column: str | None, separator: str | None
) -> Iterator[tuple[int, str, str, dict[str, str]]]:
    """Yield the line that each row ends in, its image and its caption, either of them possibly empty, and its other cells by column.

    Args:
        table: the file.
        image_column, caption_column: None: the first of `IMAGE_COLUMNS` and `CAPTION_COLUMNS` that the table has.
        separator: between columns; None: it is detected.

    Raises:
        ConfigError: a separator of several characters.
        DataError: a missing column, or as `read_table`.
    """
    if separator is not None and len(separator) != 1:
        raise ConfigError(f"--separator: expected one character, as in --separator ';', got {separator}")
    candidates = (
        (image_column,) if image_column else IMAGE_COLUMNS,
        (caption_column,) if caption_column else CAPTION_COLUMNS,
    )
    others: list[str] = []

    def choose(names: Sequence[str]) -> list[str]:
        chosen = _columns(table, names, candidates)
        others[:] = [name for name in names if name and name not in chosen and list(names).count(name) == 1]
        return [*chosen, *others]

    for line, (image, caption, *cells) in read_table(table, choose, candidates[0], separator, 2):
        yield line, image, caption, {name: cell for name, cell in zip(others, cells, strict=True) if cell}


def _columns(table: Path, header: Iterable[str], column_candidates: tuple[tuple[str, ...], ...]) -> list[str]:
    header, columns = list(header), []
    for option, names in zip(("--image-column", "--caption-column"), column_candidates, strict=True):
        column = next((name for name in names if name in header), None) or _match_column(names, header)
        if column is not None and header.count(column) > 1:
            raise DataError(
                f"{table}: has {header.count(column)} columns named {column!r}. Keep this name for the column that {option} reads, and rename the others."
            )
        if column is None:
            what, usual = ("the picture", "image") if option == "--image-column" else ("the caption", "caption")
            expected_name = next(iter(names)) if len(names) == 1 else usual
            urls = option == "--image-column" and re.search(r"\burl\b", " ".join(header)) is not None
            hint = "add --url-cache FOLDER for the addresses in url" if urls else did_you_mean(expected_name, header)
            raise DataError(
                f"{table}: no column for {what}, got the columns {', '.join(header)}. Rename the matching column to "
                f"{expected_name}, or specify it with {option}; {hint}"
            )
        columns.append(column)
    return columns


def _match_column(names: Iterable[str], header: Iterable[str]) -> str | None:
    """Return the column that is one of `names`, ignoring case and surrounding spaces."""
    by_normalized_name = {name.strip().lower(): name for name in reversed(list(header))}
    return next((by_normalized_name[name] for name in names if name in by_normalized_name), None)


def convert_csv(
    table: Path,
    out: Path,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    per_shard: int = 1000,
    part: Share | None = None,
    test: int = 0,
    skip_missing: bool = False,
) -> ConversionResult:
    """Convert a table with image paths (relative to the table) and captions.

    Args:
        table, out: file and folder.
        image_column, caption_column, separator: as in `table_rows`.
        per_shard, part, test: as in `convert_folder`; the test set is for retrieval, with an image's captions together.
        skip_missing: skip and count rows whose image is missing.

    Raises:
        DataError: no such file, not UTF-8, a missing column, a row without image or caption (the line is named), fewer
            images than the test set needs, or shards in `out` already.
    """
    if not table.is_file():
        raise DataError(f"{table}: no such file")

    def samples() -> Iterator[tuple[int, CaptionedImage]]:
        for number, (line, image, text, others) in enumerate(
            table_rows(table, image_column, caption_column, separator)
        ):
            if is_in_part(number, per_shard, part):
                if (
                    sample := _load_table_sample(table, line, image, text, others, skip_missing, with_lists)
                ) is not None:
                    yield number, sample
                else:
                    missing.add(line)  # the table is read twice if a test set is kept

    missing: set[int] = set()
    settings: dict[str, object] = {"source": str(table), "columns": f"{image_column}, {caption_column}"}
    if skip_missing:
        settings["skip_missing"] = True
    try:
        # If any cell has a list, all samples list their captions, so that training can draw from one key.
        rows = table_rows(table, image_column, caption_column, separator)
        with_lists = any(text.strip()[:1] == "[" and text.strip()[-1:] == "]" for _, _, text, _ in rows)
        return write_dataset(samples, out, per_shard, part, test, settings)._replace(missing=len(missing))
    except UnicodeDecodeError as error:
        raise DataError(f"{table}: not UTF-8 ({error}). Convert it, e.g. with iconv -f latin1 -t utf-8.") from None


def _load_table_sample(
    table: Path,
    line: int,
    image: str,
    caption: str,
    others: Mapping[str, str],
    skip_missing: bool,
    with_lists: bool,
) -> CaptionedImage | None:
    if not image.strip() or is_missing(caption):
        name, cell = ("caption", caption) if image.strip() else ("image", image)
        raise DataError(
            f"{table}, line {line}: the {name} is missing, got {cell.strip()!r}. Fill in the cell, or remove the row."
        )
    path = table.parent / image
    suffix = suffixes().get(path.suffix.lower())
    if not path.is_file():
        if skip_missing:
            return None
        is_here = Path(image).is_file()
        here = " The file exists in the current folder, but paths are relative to the table." if is_here else ""
        raise DataError(
            f"{table}, line {line}: no such image, got {image!r}.{here} Correct the row, or skip such rows with --skip-missing."
        )
    if suffix is None:
        raise DataError(f"{table}, line {line}: not a readable image, got {image!r}. Convert it, or remove the row.")
    # Keep the file's own bytes if it is upright, because encoding a JPEG again would lose quality.
    sample = apply_exif_orientation(path.read_bytes(), suffix)
    try:
        listed = parse_list(caption)
        captions = [text for text in listed or () if not is_missing(text)]
        if listed is not None and not captions:
            raise DataError(
                f"{table}, line {line}: the list has no caption, got {caption}. Add one, or remove the row."
            )
    except BadSampleError as bad:
        raise DataError(f"{table}, line {line}: {bad.full_message()}. Write the list in JSON.") from None
    facts: dict[str, Any] = {**others, "captions": captions or [caption]} if with_lists else dict(others)
    return sample._replace(
        caption=captions[0] if captions else caption,
        captions=tuple(captions),
        json=replace_surrogates(json.dumps(facts, ensure_ascii=False)).encode() if facts else b"",
    )
