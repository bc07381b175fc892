"""Captioned images to shards: training samples, and a test set that shares no image with them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import read_json, write_whole
from sparo_train.data.examples.samples import decode_image

from .writer import Fields, write_shards, write_wds_layout

Share = tuple[int, int]  # which, of how many


class CaptionedImage(NamedTuple):
    """One image: its member's extension, its bytes, its caption; the class folder, where that gave the caption.

    turned: the picture was stored turned, and is written upright.  refused: why no reader takes it, by its header; else empty.
    """

    suffix: str
    image: bytes
    caption: str | bytes = ""
    label: str | None = None
    turned: bool = False
    refused: str = ""

    @property
    def fields(self) -> Fields:
        text = self.caption.encode() if isinstance(self.caption, str) else self.caption
        return {self.suffix: self.image, "txt": text}


class ConversionResult(NamedTuple):
    """Samples written to train on and to score; `task` is what the test set is for, None where there is none.

    copies: of images to score, kept from training with them.  broken: images that cannot be decoded, told where there is a test set.
    turned: pictures that were turned as their EXIF orientation says.  left_out: files that are no readable pictures, by suffix.
    missing: rows of a table without a picture, which were skipped.  numbered: captions name classes by number.
    refused: written pictures that no reader takes, by reason.
    """

    train: int
    test: int = 0
    task: str | None = None
    copies: int = 0
    broken: int = 0
    turned: int = 0
    left_out: Mapping[str, int] = {}
    missing: int = 0
    numbered: bool = False
    refused: Mapping[str, int] = {}


def write_dataset(
    samples: Callable[[], Iterator[tuple[int, CaptionedImage]]],
    out: Path,
    per_shard: int,
    part: Share | None,
    test: int,
    settings: dict[str, object],
    template: str | None = None,
    class_names: Mapping[str, str] | None = None,
) -> ConversionResult:
    _refuse_nonempty_output(out, {**settings, "per_shard": per_shard, "part": part})
    test_hashes, broken = _select_test_images(samples, test) if test else (set[bytes](), 0)
    test_samples: dict[bytes, list[CaptionedImage]] = {}
    labels: set[str | None] = set()
    count = turned = 0
    refused: Counter[str] = Counter()

    def train_samples() -> Iterator[tuple[str, Fields]]:
        nonlocal count, turned
        for number, sample in samples():
            content = _image_hash(sample)
            turned += sample.turned
            refused.update([sample.refused] if sample.refused else [])
            labels.add(sample.label)
            if content in test_hashes:
                test_samples.setdefault(content, []).append(sample)
                continue
            count += 1
            yield f"{number:09d}", sample.fields

    shards = write_shards(out / "train" if test else out, train_samples(), per_shard, part or (0, 1))
    if not (count or test_samples or part):
        raise DataError(f"{settings['source']}: has no row with an image and its caption")
    if not test_samples:
        return ConversionResult(count, turned=turned, refused=refused)
    copies = sum(map(len, test_samples.values())) - len(test_samples)
    classes = [label for label in class_names or {} if label in labels]
    task = "zeroshot" if template is not None and len(classes) == len(labels) else "retrieval"
    try:
        if task == "zeroshot":
            _write_classes(out / task, list(test_samples.values()), classes, class_names or {}, template or "")
        else:
            _write_captions(out / task, list(test_samples.values()))
    except BaseException:
        # Without its test the set would be in the way of the next try.
        for path in shards:
            path.unlink(missing_ok=True)
        raise
    return ConversionResult(count, len(test_samples), task, copies, broken, turned, refused=refused)


def _select_test_images(
    samples: Callable[[], Iterator[tuple[int, CaptionedImage]]], test: int
) -> tuple[set[bytes], int]:
    """Contents of the images that are kept for the test, and how many images cannot be decoded, which no test takes.

    By a hash of their content, so that no copy of one of them is trained on.
    """
    contents: dict[bytes, bool] = {}
    broken = 0
    for _, sample in samples():
        content = _image_hash(sample)
        if content not in contents:
            contents[content] = _decodes(sample.image)
        broken += not contents[content]
    readable = sorted(content for content, decodes in contents.items() if decodes)
    if test > len(readable) // 2:
        raise DataError(f"--test {test}: there are {len(readable)} different images; keep half of them or fewer")
    return set(readable[:test]), broken


def _decodes(image: bytes) -> bool:
    try:
        decode_image(image, pixel_range="percentiles")  # any range: the training's data.pixel_range is not known yet
    except BadSampleError:
        return False
    return True


def _image_hash(sample: CaptionedImage) -> bytes:
    return hashlib.blake2b(sample.image, digest_size=16).digest()


def _write_classes(
    out: Path, images: list[list[CaptionedImage]], classes: list[str], class_names: Mapping[str, str], template: str
) -> None:
    samples = (
        (
            f"{number:09d}",
            {copies[0].suffix: copies[0].image, "cls": str(classes.index(copies[0].label or "")).encode()},
        )
        for number, copies in enumerate(images)
    )
    write_wds_layout(out, samples, classnames=[class_names[name] for name in classes], templates=[template])


def _write_captions(out: Path, images: list[list[CaptionedImage]]) -> None:
    def samples() -> Iterator[tuple[str, Fields]]:
        for number, copies in enumerate(images):
            # One caption per line: a line end within one would be two.
            texts = [" ".join(copy.fields["txt"].decode("utf-8", "replace").split()) for copy in copies]
            captions = "\n".join(dict.fromkeys(texts)).encode()
            yield f"{number:09d}", {copies[0].suffix: copies[0].image, "txt": captions}

    write_wds_layout(out, samples(), dataset_type="retrieval")


def is_in_part(number: int, per_shard: int, part: Share | None) -> bool:
    """Whether a sample is in a shard of this part."""
    return part is None or number // per_shard % part[1] == part[0]


def _refuse_nonempty_output(out: Path, settings: dict[str, object]) -> None:
    """Raise DataError where `out` has shards of anything else than other parts of the same conversion."""
    part, mark = settings.pop("part"), out / ".parts.json"
    shards = sorted([*out.glob("*.tar"), *out.glob("train/*.tar")])
    if isinstance(part, tuple):
        settings["parts"] = part[1]
        if mark.exists() and read_json(mark, dict, DataError) == settings:
            return
        if not shards:
            write_whole(mark, json.dumps(settings))  # other parts may do the same now
            return
    if shards:
        raise DataError(
            f"{out}: holds {len(shards)} shard(s) already, which would mix with the new ones; name an empty folder"
        )
