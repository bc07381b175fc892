"""Other people's data to shards: image folders, CSV tables, and Debian's Fashion-MNIST."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from sparo_train.core.errors import DataError, did_you_mean
from sparo_train.core.files import write_whole
from sparo_train.core.untrusted import read_json
from sparo_train.data.read.folder import IMAGE_SUFFIXES

from .writer import Fields, write_shards, write_wds_layout

FASHION = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
FASHION_TEMPLATES = ["a photo of a {c}", "a {c}"]
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")


Part = tuple[int, int]  # which, of how many


def convert_folder(
    source: Path, out: Path, template: str = "a photo of a {c}", per_shard: int = 1000, part: Part | None = None
) -> int:
    """An image folder: `CLASS/name.jpg` captioned by `template`, or `name.jpg` beside `name.txt`; returns samples written.

    Args:
        part: write only the i-th of n parts; all of them together write the same bytes as one conversion.

    Raises:
        DataError: no images, an image without class folder and caption file (it is named), or shards in `out` already.
    """
    _refuse_used(out, {"source": str(source), "template": template, "per_shard": per_shard, "part": part})
    # In the order of names, so that parts made on several machines fit together.
    images = sorted(p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise DataError(f"{source}: no .jpg, .png or .webp image below this folder")

    def samples() -> Iterator[tuple[str, Fields]]:
        for number, path in enumerate(images):
            if not _within(number, per_shard, part):
                continue
            beside = path.with_suffix(".txt")
            if beside.is_file():
                text = beside.read_bytes()
            elif path.parent != source:
                text = template.replace("{c}", path.parent.name.replace("_", " ")).encode()
            else:
                raise DataError(f"{path}: no class folder and no {beside.name} beside it, so it has no caption")
            yield f"{number:09d}", {IMAGE_SUFFIXES[path.suffix.lower()]: path.read_bytes(), "txt": text}

    write_shards(out, samples(), per_shard, part or (0, 1))
    return sum(_within(number, per_shard, part) for number in range(len(images)))


def convert_csv(
    table: Path,
    out: Path,
    image_column: str,
    caption_column: str,
    separator: str | None = None,
    per_shard: int = 1000,
    part: Part | None = None,
) -> int:
    """A table with image paths (relative to it) and captions; returns samples written.

    Args:
        part: as for `convert_folder`.
        separator: between columns; None: the one of tab, comma, semicolon that makes `image_column` a column.

    Raises:
        DataError: no such file, not UTF-8, a missing column, a row without image or caption (the line is named), or
            shards in `out` already.
    """
    columns = f"{image_column}, {caption_column}"
    _refuse_used(out, {"source": str(table), "columns": columns, "per_shard": per_shard, "part": part})
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    count = 0

    def samples() -> Iterator[tuple[str, Fields]]:
        nonlocal count
        with table.open(newline="", encoding="utf-8-sig") as stream:
            # A comma within a caption must not decide what separates columns.
            delimiter = separator or _separator(stream.readline(), image_column)
            stream.seek(0)
            reader = csv.DictReader(stream, delimiter=delimiter)
            for column in (image_column, caption_column):
                if column not in (reader.fieldnames or ()):
                    raise DataError(f"{table}: no column {column!r}; {did_you_mean(column, reader.fieldnames or ())}")
            for number, row in enumerate(reader):
                if not _within(number, per_shard, part):
                    continue
                if not row[image_column] or not row[caption_column]:
                    raise DataError(f"{table}, line {reader.line_num}: no image or no caption")
                path = table.parent / row[image_column]
                suffix = IMAGE_SUFFIXES.get(path.suffix.lower())
                if suffix is None or not path.is_file():
                    raise DataError(f"{table}, line {reader.line_num}: {row[image_column]!r} is no image file here")
                yield f"{number:09d}", {suffix: path.read_bytes(), "txt": row[caption_column].encode()}
                count += 1

    try:
        write_shards(out, samples(), per_shard, part or (0, 1))
    except UnicodeDecodeError as error:
        raise DataError(f"{table}: not UTF-8 ({error}); convert it, e.g. with iconv -f latin1 -t utf-8") from None
    return count


def make_fashion_mnist(root: Path, raw: Path = FASHION_FOLDER) -> dict[str, int]:
    """Fashion-MNIST (Debian: `apt-get install dataset-fashion-mnist`) as captioned shards and a zero-shot test.

    Raises:
        DataError: the files are not there.
    """
    images, labels = (
        read_idx(raw / "train-images-idx3-ubyte.gz"),
        read_idx(raw / "train-labels-idx1-ubyte.gz"),
    )
    write_shards(
        root / "train",
        ((f"{i:05d}", {"png": _png(x), "txt": FASHION_TEMPLATES[i % 2].replace("{c}", FASHION[y]).encode(), "cls": str(y).encode()})
         for i, (x, y) in enumerate(zip(images, labels, strict=True))),
        5000,
    )  # fmt: skip
    tests, answers = read_idx(raw / "t10k-images-idx3-ubyte.gz"), read_idx(raw / "t10k-labels-idx1-ubyte.gz")
    samples = [
        (f"{i:05d}", {"png": _png(x), "cls": str(y).encode()})
        for i, (x, y) in enumerate(zip(tests, answers, strict=True))
    ]
    write_wds_layout(root / "zeroshot", samples, classnames=list(FASHION), templates=FASHION_TEMPLATES)
    return {"train": len(images), "zeroshot": len(tests)}


def read_idx(path: Path) -> np.ndarray:
    """An array in Yann LeCun's idx format, gzipped (unsigned bytes)."""
    if not path.is_file():
        raise DataError(f"{path}: missing; Debian: apt-get install dataset-fashion-mnist, or give --raw FOLDER")
    with gzip.open(path) as stream:
        data = stream.read()
    if data[:3] != b"\0\0\x08":
        raise DataError(f"{path}: not an idx file of unsigned bytes")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def _separator(header: str, column: str) -> str:
    names = {s: [name.strip('"') for name in header.rstrip("\r\n").split(s)] for s in ("\t", ",", ";")}
    return next((s for s, found in names.items() if column in found), ",")


def _within(number: int, per_shard: int, part: Part | None) -> bool:
    """Whether a sample is in a shard of this part."""
    return part is None or number // per_shard % part[1] == part[0]


def _refuse_used(out: Path, facts: dict[str, object]) -> None:
    """Raise DataError where `out` has shards of anything else than other parts of the same conversion."""
    part, mark = facts.pop("part"), out / ".parts.json"
    found = sorted(out.glob("*.tar"))
    if isinstance(part, tuple):
        facts["parts"] = part[1]
        if mark.exists() and read_json(mark, dict, DataError) == facts:
            return
        if not found:
            write_whole(mark, json.dumps(facts))  # other parts may do the same now
            return
    if found:
        raise DataError(
            f"{out}: holds {len(found)} shard(s) already, which would mix with the new ones; name an empty folder"
        )


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
