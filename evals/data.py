"""Evaluation sets on disk: clip-benchmark's `wds/` layout, and pairs in the same frame.

ROOT/test/nshards.txt  ROOT/test/0.tar …   key.jpg + key.cls | key.txt (captions, one per line) | key.json (pairs)
ROOT/classnames.txt  ROOT/zeroshot_classification_templates.txt  ROOT/dataset_type.txt
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.samples import decode_image, image_bytes
from sparo_train.data.shards import ShardReader
from sparo_train.data.transforms import eval_pixels

IMAGE_KEYS = ("webp", "png", "jpg", "jpeg")


class Item(NamedTuple):
    """One evaluation sample: its key, pixels (S, S, 3) uint8, and its other members as they are."""

    key: str
    pixels: np.ndarray
    fields: dict[str, bytes]


class EvalSet:
    """A folder in the layout above, read in order.

    Raises:
        DataError: missing files, named with what should be there.
    """

    def __init__(self, root: str | Path, split: str = "test"):
        self.root, self.split = Path(root), split
        counter = self.root / split / "nshards.txt"
        if not counter.is_file():
            raise DataError(f"{counter}: missing; an evaluation set has {split}/nshards.txt and {split}/0.tar …")
        try:
            number = int(counter.read_text(encoding="utf-8"))
        except ValueError:
            raise DataError(f"{counter}: must hold the number of shards, nothing else") from None
        self.shards = [str(self.root / split / f"{i}.tar") for i in range(number)]

    def require(self, names: Sequence[str]) -> None:
        """Raise `DataError` where a shard or one of these files is missing."""
        for path in [*map(Path, self.shards), *(self.root / name for name in names)]:
            if not path.is_file():
                raise DataError(f"{path}: missing; the evaluation set {self.root} needs it")

    def lines(self, name: str) -> list[str]:
        """Non-empty lines of a text file beside the split."""
        path = self.root / name
        if not path.is_file():
            raise DataError(f"{path}: missing; this task needs it (one entry per line)")
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    def items(self, size: int) -> Iterator[Item]:
        """All samples in the order of their shards. A sample without a readable image is an error here: scores need all."""
        reader = ShardReader()
        try:
            for url in self.shards:
                index = reader.index(url)
                if not index.intact:
                    raise DataError(f"{url}: truncated; scores over part of a test set mean nothing, fetch it again")
                for ordinal in range(len(index)):
                    key = f"number {ordinal}"
                    try:
                        key, fields = reader.read(url, ordinal)
                        pixels = eval_pixels(decode_image(image_bytes(fields, IMAGE_KEYS)), size)
                    except BadSampleError as bad:
                        raise DataError(f"{url}: sample {key}: {bad}") from None
                    yield Item(key, pixels, fields)
        finally:
            reader.close()


def label(item: Item, where: Path) -> int:
    """The class index of a `.cls` member."""
    try:
        return int(item.fields["cls"])
    except (KeyError, ValueError):
        raise DataError(f"{where}: sample {item.key} has no integer .cls member") from None


def captions(item: Item, where: Path) -> list[str]:
    """The captions of a `.txt` member, one per line."""
    try:
        text = item.fields.get("txt", b"").decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{where}: sample {item.key}: .txt is not UTF-8") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{where}: sample {item.key} has no caption in .txt")
    return lines


def pair(item: Item, where: Path) -> dict[str, Any]:
    """`kind`, `caption`, `negative_caption` of a `.json` member."""
    try:
        found = json.loads(item.fields["json"])
        return {k: found[k] for k in ("kind", "caption", "negative_caption")}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: sample {item.key}: .json needs kind, caption, negative_caption ({error})") from None
