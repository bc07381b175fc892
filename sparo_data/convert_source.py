"""Conversion of data sets of other libraries to shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.decode.decoding import open_picture
from sparo_train.data.examples.samples import image_bytes, list_captions, parse_list
from sparo_train.data.sources.base import Source

from .captioned_sets import CaptionedImage, ConversionResult, Share, is_in_part, replace_surrogates, write_dataset
from .convert import apply_exif_orientation

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}  # others are their format's name


def convert_source(source: Source, out: Path, per_shard: int, part: Share | None, test: int) -> ConversionResult:
    """Convert the images and captions of a source to shards. Unusable samples are counted and skipped.

    A sample has the image, its first caption (`.txt`), and, if there are more captions or other columns, `.json`.

    Args:
        source: the source.
        out: folder for the shards.
        per_shard: samples per shard.
        part: write only the i-th of n parts; all parts together write the same samples as one conversion, and the same bytes if no sample is skipped.
        test: number of images to keep from training, for a retrieval set.

    Raises:
        DataError: no usable sample, fewer images than the test set needs, or shards in `out` already.
    """
    skipped: dict[int, str] = {}

    def samples() -> Iterator[tuple[int, CaptionedImage]]:
        for number, (storage, ordinal) in enumerate((s, i) for s in source.storages for i in range(len(s))):
            if not is_in_part(number, per_shard, part):
                continue
            try:
                _, fields = storage.read(ordinal)
                yield number, _captioned_image(fields, source)
            except BadSampleError as bad:
                skipped[number] = str(bad)

    settings: dict[str, object] = {"source": source.storages[0].url, "caption_key": source.config.caption_key}
    try:
        written = write_dataset(samples, out, per_shard, part, test, settings)
    except DataError as error:
        if not skipped:
            raise
        raise DataError(f"{error} Samples that were skipped, by reason: {_counts(skipped)}.") from None
    return written._replace(skipped=dict(Counter(skipped.values())))


def _counts(skipped: Mapping[int, str]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in Counter(skipped.values()).most_common())


def _captioned_image(fields: dict[str, bytes], source: Source) -> CaptionedImage:
    captions = list_captions(fields, source.config)
    image = image_bytes(fields, source.config.image_keys)
    extension = image_extension(image)
    sample = apply_exif_orientation(image, extension)
    facts = other_facts(fields, captions, _is_list(fields, source))
    return sample._replace(caption=captions[0], captions=tuple(captions), json=replace_surrogates(facts).encode())


def _is_list(fields: dict[str, bytes], source: Source) -> bool:
    """Return whether the captions of a sample are a list, which may have a single entry."""
    member, key = source.config.caption_member(source.config.caption_key or "")
    return not key and parse_list(fields.get(member, b"").decode("utf-8", "replace")) is not None


def other_facts(fields: dict[str, bytes], captions: Sequence[str] = (), is_list: bool = False) -> str:
    """Return the `.json` of a sample, with its class (`label`) and, if there are several or they are a list, its captions (`captions`).

    Values that it has already are kept. Empty if there is nothing.
    """
    text = fields.get("json", b"").decode("utf-8", "replace")
    more: dict[str, Any] = {"captions": list(captions)} if is_list or len(captions) > 1 else {}
    if "cls" in fields:
        label = fields["cls"].decode("utf-8", "replace").strip()
        more["label"] = int(label) if label.isdecimal() else label
    try:
        facts = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
    if not isinstance(facts, dict) or not more:
        return text
    return json.dumps({**more, **facts}, ensure_ascii=False)


def image_extension(image: bytes) -> str:
    """Return the usual suffix of an image file, without a dot."""
    kind = open_picture(image).format or ""
    return _EXTENSIONS.get(kind, kind.lower())
