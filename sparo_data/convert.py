"""One's own pictures to shards: folders and tables of images with captions, and a test set that shares no image with training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.files import write_whole
from sparo_train.core.untrusted import read_json, shown
from sparo_train.data.examples.samples import decode_image
from sparo_train.data.read.folder import IMAGE_SUFFIXES

from .caption_tables import table_rows
from .writer import Fields, write_shards, write_wds_layout

Share = tuple[int, int]  # which, of how many


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
    part: Share | None = None,
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
    if "{c}" not in template:
        raise ConfigError(f"--template {template!r}: has no {{c}}, which stands for the class")
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
        if label.encode(errors="replace").decode() != label:  # bytes of a name that are no UTF-8
            raise DataError(
                f"{shown(str(path.parent))}: its name is no UTF-8 and would be the caption; rename the folder"
            )
        return Captioned(suffix, path.read_bytes(), template.replace("{c}", label), label)
    raise DataError(f"{path}: no class folder and no {beside.name} beside it, so it has no caption")


def convert_csv(
    table: Path,
    out: Path,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    per_shard: int = 1000,
    part: Share | None = None,
    test: int = 0,
) -> Converted:
    """A table with image paths (relative to it) and captions.

    Args:
        image_column, caption_column, separator: as of `table_rows`.
        part, test: as for `convert_folder`; the test set is one of retrieval, an image's captions together.

    Raises:
        DataError: no such file, not UTF-8, a missing column, a row without image or caption (the line is named), fewer images
            than the test wants, or shards in `out` already.
    """
    if not table.is_file():
        raise DataError(f"{table}: no such file")

    def samples() -> Iterator[tuple[int, Captioned]]:
        for number, (line, *row) in enumerate(table_rows(table, image_column, caption_column, separator)):
            if _within(number, per_shard, part):
                yield number, _in_row(table, line, *row)

    facts: dict[str, object] = {"source": str(table), "columns": f"{image_column}, {caption_column}"}
    try:
        return _written(samples, out, per_shard, part, test, facts)
    except UnicodeDecodeError as error:
        raise DataError(f"{table}: not UTF-8 ({error}); convert it, e.g. with iconv -f latin1 -t utf-8") from None


def _in_row(table: Path, line: int, image: str, caption: str) -> Captioned:
    if not image.strip() or not caption.strip():
        raise DataError(f"{table}, line {line}: no image or no caption")
    path = table.parent / image
    suffix = IMAGE_SUFFIXES.get(path.suffix.lower())
    if suffix is None or not path.is_file():
        raise DataError(f"{table}, line {line}: {image!r} is no image file here")
    # The file's own bytes: decoded and written again, a JPEG would lose a little.
    return Captioned(suffix, path.read_bytes(), caption)


def _written(
    samples: Callable[[], Iterator[tuple[int, Captioned]]],
    out: Path,
    per_shard: int,
    part: Share | None,
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

    shards = write_shards(out / "train" if test else out, to_train(), per_shard, part or (0, 1))
    if not (count or held or part):
        raise DataError(f"{facts['source']}: has no row with an image and its caption")
    if not held:
        return Converted(count)
    copies = sum(map(len, held.values())) - len(held)
    classes = sorted(label for label in labels if label is not None)
    task = "zeroshot" if template is not None and len(classes) == len(labels) else "retrieval"
    try:
        if task == "zeroshot":
            _write_classes(out / task, list(held.values()), classes, template or "")
        else:
            _write_captions(out / task, list(held.values()))
    except BaseException:
        # Without its test the set would be in the way of the next try.
        for path in shards:
            path.unlink(missing_ok=True)
        raise
    return Converted(count, len(held), task, copies, broken)


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


def _within(number: int, per_shard: int, part: Share | None) -> bool:
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
