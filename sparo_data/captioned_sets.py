"""Shards of captioned images: training samples, and a test set that shares no image with them."""

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

Share = tuple[int, int]  # (index, number of parts)


def replace_surrogates(text: str) -> str:
    """Return a text with U+FFFD in place of halves of surrogate pairs, which UTF-8 cannot encode: rests of an emoji that was cut."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class CaptionedImage(NamedTuple):
    """One image: the member's extension, its bytes, its caption, and the class folder if the caption comes from it.

    Attributes:
        captions: all captions, if there may be several.
        json: content of a `.json` member; empty for none.
        turned: the image was stored rotated and is written upright.
        refused: why no reader accepts the image, from its header; otherwise empty.
    """

    suffix: str
    image: bytes
    caption: str | bytes = ""
    label: str | None = None
    turned: bool = False
    refused: str = ""
    captions: tuple[str, ...] = ()
    json: bytes = b""

    @property
    def fields(self) -> Fields:
        text = replace_surrogates(self.caption).encode() if isinstance(self.caption, str) else self.caption
        return {self.suffix: self.image, "txt": text, **({"json": self.json} if self.json else {})}

    def texts(self) -> list[str]:
        """Return all captions, each in one line."""
        texts = self.captions or (self.fields["txt"].decode("utf-8", "replace"),)
        return [" ".join(text.split()) for text in texts]


class ConversionResult(NamedTuple):
    """Result of a conversion: samples written for training and for evaluation; `task` is the task of the test set, or None.

    Attributes:
        copies: copies of test images, which are not trained on.
        broken: images that cannot be decoded, counted if there is a test set.
        turned: images that were rotated according to their EXIF orientation.
        left_out: number of files that are not readable images, by suffix.
        missing: skipped rows of a table whose image is missing.
        numbered: captions name classes by number.
        refused: written images that no reader accepts, by reason.
        skipped: samples that were not written, by reason.
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
    skipped: Mapping[str, int] = {}


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
    """Write captioned images as training shards, and `test` of them as an evaluation set."""
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
        raise DataError(f"{settings['source']}: has no row with an image and its caption.")
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
        # Without its test set, the training set would only block the next attempt.
        for path in shards:
            path.unlink(missing_ok=True)
        raise
    return ConversionResult(count, len(test_samples), task, copies, broken, turned, refused=refused)


def _select_test_images(
    samples: Callable[[], Iterator[tuple[int, CaptionedImage]]], test: int
) -> tuple[set[bytes], int]:
    """Return content hashes of the test images, and the number of images that cannot be decoded, which are never test images.

    Images are selected by a hash of their content, so that no copy of a test image is trained on.
    """
    contents: dict[bytes, bool] = {}
    broken = 0
    for _, sample in samples():
        content = _image_hash(sample)
        if content not in contents:
            contents[content] = _can_decode(sample.image)
        broken += not contents[content]
    readable = sorted(content for content, decodes in contents.items() if decodes)
    if test > len(readable) // 2:
        raise DataError(
            f"--test {test}: got {len(readable)} different images, and at most half of them can be held out. Give a smaller --test."
        )
    return set(readable[:test]), broken


def _can_decode(image: bytes) -> bool:
    try:
        decode_image(
            image, pixel_range="percentiles"
        )  # any range, because training's data.pixel_range is not known yet
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
            # One caption per line, so a line end within a caption would make two.
            texts = [text for copy in copies for text in copy.texts()]
            captions = "\n".join(dict.fromkeys(texts)).encode()
            yield f"{number:09d}", {copies[0].suffix: copies[0].image, "txt": captions}

    write_wds_layout(out, samples(), dataset_type="retrieval")


def is_in_part(number: int, per_shard: int, part: Share | None) -> bool:
    """Return whether a sample is in a shard of this part."""
    return part is None or number // per_shard % part[1] == part[0]


def _refuse_nonempty_output(out: Path, settings: dict[str, object]) -> None:
    """Raise DataError if `out` has shards of anything but other parts of the same conversion."""
    part, mark = settings.pop("part"), out / ".parts.json"
    shards = sorted([*out.glob("*.tar"), *out.glob("train/*.tar")])
    if isinstance(part, tuple):
        settings["parts"] = part[1]
        if mark.exists() and read_json(mark, dict, DataError) == settings:
            return
        if not shards:
            write_whole(mark, json.dumps(settings))  # other parts may be writing now
            return
    if shards:
        raise DataError(
            f"{out}: contains {len(shards)} shard(s) already, which would mix with the new ones. Name an empty folder."
        )
