"""One's own pictures to shards: folders and tables of images with captions, and a test set that shares no image with training."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sparo_train.core.errors import BadSampleError, DataError, did_you_mean
from sparo_train.core.files import write_whole
from sparo_train.core.untrusted import read_json
from sparo_train.data.examples.samples import decode_image
from sparo_train.data.read.folder import IMAGE_SUFFIXES

from .writer import Fields, write_shards, write_wds_layout

Part = tuple[int, int]  # which, of how many
IMAGE_COLUMNS = ("filepath", "image", "image_path", "img", "file_name", "filename", "file", "path")
CAPTION_COLUMNS = ("title", "caption", "text", "txt", "sentence")


class Captioned(NamedTuple):
    """One image: its member's extension, its bytes, its caption; the class of a class folder, where that gave the caption."""

    suffix: str
    image: bytes
    caption: str | bytes
    label: str | None = None

    @property
    def fields(self) -> Fields:
        text = self.caption.encode() if isinstance(self.caption, str) else self.caption
        return {self.suffix: self.image, "txt": text}


class Converted(NamedTuple):
    """Samples written to train on and to score; `task` is what the test set is for, None where there is none.

    copies: of images to score, kept from training with them.  broken: images that cannot be decoded, told where there is a test set.
    """

    train: int
    test: int = 0
    task: str | None = None
    copies: int = 0
    broken: int = 0


def convert_folder(
    source: Path,
    out: Path,
    template: str = "a photo of a {c}",
    per_shard: int = 1000,
    part: Part | None = None,
    test: int = 0,
) -> Converted:
    """An image folder: `CLASS/name.jpg` captioned by `template`, or `name.jpg` beside `name.txt`.

    Args:
        part: write only the i-th of n parts; all of them together write the same bytes as one conversion.
        test: images to keep from training; `out` then has `train/` and a set to score: `zeroshot/` where every caption is of a
            class folder, `retrieval/` otherwise.

    Raises:
        DataError: no images, an image without class folder and caption file (it is named), fewer images than the test wants, or
            shards in `out` already.
    """
    # In the order of names, so that parts made on several machines fit together.
    images = sorted(p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and not _hidden(p, source))
    if not images:
        raise DataError(f"{source}: no .jpg, .png or .webp image below this folder")

    def samples() -> Iterator[tuple[int, Captioned]]:
        for number, path in enumerate(images):
            if _within(number, per_shard, part):
                yield number, _in_folder(path, source, template)

    facts: dict[str, object] = {"source": str(source), "template": template}
    return _written(samples, out, per_shard, part, test, facts, template)


def _hidden(path: Path, source: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(source).parts)


def _in_folder(path: Path, source: Path, template: str) -> Captioned:
    beside, suffix = path.with_suffix(".txt"), IMAGE_SUFFIXES[path.suffix.lower()]
    if beside.is_file():
        if not beside.read_bytes().strip():
            raise DataError(f"{beside}: is empty, so {path.name} has no caption; write one, or take both away")
        return Captioned(suffix, path.read_bytes(), beside.read_bytes())
    if path.parent != source:
        label = path.parent.name.replace("_", " ")
        return Captioned(suffix, path.read_bytes(), template.replace("{c}", label), label)
    raise DataError(f"{path}: no class folder and no {beside.name} beside it, so it has no caption")


def convert_csv(
    table: Path,
    out: Path,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    per_shard: int = 1000,
    part: Part | None = None,
    test: int = 0,
) -> Converted:
    """A table with image paths (relative to it) and captions.

    Args:
        image_column, caption_column: None: the first of `IMAGE_COLUMNS` and `CAPTION_COLUMNS` that the table has.
        separator: between columns; None: the one of tab, comma, semicolon that makes the image column a column.
        part, test: as for `convert_folder`; the test set is one of retrieval, an image's captions together.

    Raises:
        DataError: no such file, not UTF-8, a missing column, a row without image or caption (the line is named), fewer images
            than the test wants, or shards in `out` already.
    """
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    wanted = (
        (image_column,) if image_column else IMAGE_COLUMNS,
        (caption_column,) if caption_column else CAPTION_COLUMNS,
    )

    def samples() -> Iterator[tuple[int, Captioned]]:
        with table.open(newline="", encoding="utf-8-sig") as stream:
            # A comma within a caption must not decide what separates columns.
            delimiter = separator or _separator(stream.readline(), wanted[0])
            stream.seek(0)
            reader = csv.DictReader(stream, delimiter=delimiter)
            columns = _columns(table, reader.fieldnames or (), wanted)
            try:
                for number, row in enumerate(reader):
                    if _within(number, per_shard, part):
                        yield number, _in_row(table, reader.line_num, row, *columns)
            except (
                csv.Error
            ) as error:  # most often a quote that is never closed, which takes all that follows for one caption
                raise DataError(f"{table}, line {reader.line_num}: {error}; is a quote open before it?") from None

    facts: dict[str, object] = {"source": str(table), "columns": f"{image_column}, {caption_column}"}
    try:
        return _written(samples, out, per_shard, part, test, facts)
    except UnicodeDecodeError as error:
        raise DataError(f"{table}: not UTF-8 ({error}); convert it, e.g. with iconv -f latin1 -t utf-8") from None


def _columns(table: Path, known: Iterable[str], wanted: tuple[tuple[str, ...], ...]) -> list[str]:
    known, found = list(known), []
    for option, names in zip(("--image-column", "--caption-column"), wanted, strict=True):
        column = next((name for name in names if name in known), None)
        if column is None:
            raise DataError(f"{table}: no column {names[0]!r}; {did_you_mean(names[0], known)}; {option} names another")
        found.append(column)
    return found


def _in_row(table: Path, line: int, row: dict[str, str], image_column: str, caption_column: str) -> Captioned:
    if not (row[image_column] or "").strip() or not (row[caption_column] or "").strip():
        raise DataError(f"{table}, line {line}: no image or no caption")
    path = table.parent / row[image_column]
    suffix = IMAGE_SUFFIXES.get(path.suffix.lower())
    if suffix is None or not path.is_file():
        raise DataError(f"{table}, line {line}: {row[image_column]!r} is no image file here")
    return Captioned(suffix, path.read_bytes(), row[caption_column])


def _separator(header: str, columns: Iterable[str]) -> str:
    names = {s: {name.strip('"') for name in header.rstrip("\r\n").split(s)} for s in ("\t", ",", ";")}
    return next((s for s, found in names.items() if found & set(columns)), ",")


def _written(
    samples: Callable[[], Iterator[tuple[int, Captioned]]],
    out: Path,
    per_shard: int,
    part: Part | None,
    test: int,
    facts: dict[str, object],
    template: str | None = None,
) -> Converted:
    _refuse_used(out, {**facts, "per_shard": per_shard, "part": part})
    kept, broken = _kept(samples, test) if test else (set[bytes](), 0)
    held: dict[bytes, list[Captioned]] = {}
    labels: set[str | None] = set()
    count = 0

    def to_train() -> Iterator[tuple[str, Fields]]:
        nonlocal count
        for number, found in samples():
            content = _content(found)
            labels.add(found.label)
            if content in kept:
                held.setdefault(content, []).append(found)
                continue
            count += 1
            yield f"{number:09d}", found.fields

    write_shards(out / "train" if test else out, to_train(), per_shard, part or (0, 1))
    if not held:
        return Converted(count)
    copies = sum(map(len, held.values())) - len(held)
    classes = sorted(label for label in labels if label is not None)
    if template is not None and len(classes) == len(labels):
        _write_classes(out / "zeroshot", list(held.values()), classes, template)
        return Converted(count, len(held), "zeroshot", copies, broken)
    _write_captions(out / "retrieval", list(held.values()))
    return Converted(count, len(held), "retrieval", copies, broken)


def _kept(samples: Callable[[], Iterator[tuple[int, Captioned]]], test: int) -> tuple[set[bytes], int]:
    """Contents of the images that are kept for the test, and how many images cannot be decoded, which no test takes.

    By a hash of their content, so that no copy of one of them is trained on.
    """
    contents: dict[bytes, bool] = {}
    broken = 0
    for _, found in samples():
        content = _content(found)
        if content not in contents:
            contents[content] = _decodes(found.image)
        broken += not contents[content]
    whole = sorted(content for content, decodes in contents.items() if decodes)
    if test > len(whole) // 2:
        raise DataError(f"--test {test}: there are {len(whole)} different images; keep half of them or fewer")
    return set(whole[:test]), broken


def _decodes(image: bytes) -> bool:
    try:
        decode_image(image)
    except BadSampleError:
        return False
    return True


def _content(found: Captioned) -> bytes:
    return hashlib.blake2b(found.image, digest_size=16).digest()


def _write_classes(out: Path, images: list[list[Captioned]], classes: list[str], template: str) -> None:
    samples = (
        (
            f"{number:09d}",
            {copies[0].suffix: copies[0].image, "cls": str(classes.index(copies[0].label or "")).encode()},
        )
        for number, copies in enumerate(images)
    )
    write_wds_layout(out, samples, classnames=classes, templates=[template])


def _write_captions(out: Path, images: list[list[Captioned]]) -> None:
    def samples() -> Iterator[tuple[str, Fields]]:
        for number, copies in enumerate(images):
            # One caption per line: a line end within one would be two.
            texts = [" ".join(copy.fields["txt"].decode("utf-8", "replace").split()) for copy in copies]
            captions = "\n".join(dict.fromkeys(texts)).encode()
            yield f"{number:09d}", {copies[0].suffix: copies[0].image, "txt": captions}

    write_wds_layout(out, samples(), dataset_type="retrieval")


def _within(number: int, per_shard: int, part: Part | None) -> bool:
    """Whether a sample is in a shard of this part."""
    return part is None or number // per_shard % part[1] == part[0]


def _refuse_used(out: Path, facts: dict[str, object]) -> None:
    """Raise DataError where `out` has shards of anything else than other parts of the same conversion."""
    part, mark = facts.pop("part"), out / ".parts.json"
    found = sorted([*out.glob("*.tar"), *out.glob("train/*.tar")])
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
