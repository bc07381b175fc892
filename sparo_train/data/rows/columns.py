"""Samples that are rows of a table: columns for the image, for captions, and for anything else, which goes into the sample's JSON."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ...core.config import field
from ...core.errors import BadSampleError, DataError, did_you_mean
from ...core.files import read_bytes
from ..sources.base import SourceConfig

logger = logging.getLogger(__name__)
# Usual names of the column of captions; the first one that exists is used.
CAPTION_COLUMNS = ("caption", "text", "txt", "captions", "title", "sentence", "sentences", "alt_text")
_NO_CAPTION = "caption"  # default of caption_key, for which the usual names are tried


class RowsConfig(SourceConfig):
    """Keys of sources whose samples are rows."""

    image_keys: tuple[str, ...] = field(
        ("image", "jpg", "jpeg", "png", "webp", "img", "image_bytes", "pixels", "0"),
        "Columns of images. The first one that exists is used.",
    )
    caption_key: str = field(
        _NO_CAPTION,
        "Column of captions. If it has lists, one caption is sampled each time the sample is read. If not set: the "
        "first existing column of `caption`, `text`, `txt`, `captions`, `title` and `sentence`.",
    )
    captions: dict[str, float] | None = field(
        None,
        "Several caption columns with their probabilities, instead of caption_key. If some of these columns are "
        "empty for a sample's row, their probability goes to the others.",
        min_length=1,
        examples=[{"caption": 0.5, "long_caption": 0.5}],
    )

    all_columns: bool = field(
        False, "Read all columns, into the sample's JSON, for methods that use more than the image and its caption."
    )

    def caption_member(self, key: str) -> tuple[str, str]:
        return "json", key


class Columns(NamedTuple):
    """Columns of a source: the image, and the others by the name that they have in a sample's JSON."""

    image: str
    member: str  # name of the image among a sample's members, one of `image_keys`
    others: Mapping[str, str]


def choose_columns(names: Sequence[str], config: RowsConfig, where: str) -> Columns:
    """Return the columns to read.

    Args:
        names: the columns that exist.
        config: the source.
        where: file or folder, for errors.

    Raises:
        DataError: no column for the image, or none that a caption key names.
    """
    member, image = _find_column(config.image_keys, names)
    if not image:
        raise DataError(
            f"{where}: no column for the image, got the columns {', '.join(names)}. Name the image column in image_keys; "
            f"{did_you_mean(config.image_keys[0], names)}"
        )
    others = {name: name for name in names if name != image}
    if config.captions is None and config.caption_key == _NO_CAPTION and _NO_CAPTION not in names:
        _, usual = _find_column(CAPTION_COLUMNS, list(others))
        if usual:
            others = {_NO_CAPTION if name == usual else name: name for name in others}
    elif config.has_captions:
        for key in config.captions or (config.caption_key,):
            if key and key not in others:
                raise DataError(
                    f"{where}: no column {key!r} for captions, got the columns {', '.join(names)}. Correct caption_key; "
                    f"{did_you_mean(key, names)}"
                )
    if not config.all_columns:
        wanted = config.captions or (config.caption_key,)
        others = {name: column for name, column in others.items() if name in wanted}
    return Columns(image, member, others)


def _find_column(keys: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
    """Return the first of the keys that is a column, and the column; without one, upper case and surrounding spaces are ignored."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    found = next(((key, key) for key in keys if key in names), None)
    return found or next(((key, plain[key]) for key in keys if key in plain), ("", ""))


def split_column(names: Sequence[str]) -> str | None:
    """Return the column that gives each row's split, if there is one; several data sets on the hub have it."""
    return next((name for name in names if name.strip().lower() == "split"), None)


def warn_of_several_splits(where: str, column: str, splits: Iterable[object]) -> None:
    """Warn if rows of several splits are used together."""
    names = sorted({str(split) for split in splits})
    if len(names) > 1:
        logger.warning(
            f"{where}: uses the rows of all splits. The column {column!r} contains {', '.join(names[:6])}. To use one split only, "
            "write the rows of that split to a separate file."
        )


def row_members(columns: Columns, row: Mapping[str, Any], folder: Path | None = None) -> dict[str, bytes]:
    """Return the members of a sample, which are the image file and the other columns as JSON.

    Args:
        columns: the columns to use.
        row: values by column.
        folder: folder that paths of images are relative to; None: paths are not allowed.

    Raises:
        BadSampleError: the row has no image.
    """
    values = {name: row[column] for name, column in columns.others.items() if _is_text(row.get(column))}
    text = json.dumps(values, ensure_ascii=False, default=str)
    return {
        columns.member: image_file(row.get(columns.image), folder),
        "json": text.encode("utf-8", "surrogatepass"),
    }


def _is_text(value: Any) -> bool:
    """Return whether a value contains no bytes, such as those of another image."""
    if isinstance(value, Mapping):
        return all(map(_is_text, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return all(map(_is_text, value))
    return value is not None and not isinstance(value, bytes | bytearray | memoryview)


_SAMPLED_FILES = 64


def choose_sampled(storages: Sequence[Any]) -> None:
    """Mark at most 64 local files of a data set; the fingerprint reads some of their rows, to notice changes that keep all sizes."""
    for storage in storages[:: -(-len(storages) // _SAMPLED_FILES) or 1]:
        storage.is_sampled = "://" not in storage.url


def image_file(value: Any, folder: Path | None = None) -> bytes:
    """Return the encoded bytes of an image, whose column has bytes, a path, a dictionary of both, or a picture.

    Raises:
        BadSampleError: the cell has no bytes, or the path cannot be read.
    """
    if isinstance(value, Mapping):
        found = value.get("bytes")
        value = found if found is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Image.Image):
        return encode_picture(value)
    if isinstance(value, str) and value and folder is not None:
        try:
            return read_bytes(folder / value, DataError)
        except (DataError, ValueError):  # a path with a null byte
            raise BadSampleError("unreadable file", detail=os.fspath(folder / value)) from None
    raise BadSampleError("missing image")


def encode_picture(picture: Image.Image) -> bytes:
    """Encode a picture without loss and without compression where possible, because it is decoded again at once."""
    buffer = io.BytesIO()
    kind = "PPM" if picture.mode in ("RGB", "L") else "TIFF" if picture.mode in ("CMYK", "YCbCr", "F", "I") else "PNG"
    try:
        picture.save(buffer, format=kind, **({"compress_level": 1} if kind == "PNG" else {}))
    except (OSError, ValueError):
        raise BadSampleError("bad image") from None
    return buffer.getvalue()
