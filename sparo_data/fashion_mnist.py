"""Debian's Fashion-MNIST as captioned shards and a zero-shot test."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from sparo_train.core.errors import DataError

from .writer import encode_image, write_shards, write_wds_layout

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


def make_fashion_mnist(root: Path, raw: Path = FASHION_FOLDER) -> dict[str, int]:
    """Convert Fashion-MNIST (Debian: `apt-get install dataset-fashion-mnist`) to captioned shards and a zero-shot test.

    Raises:
        DataError: files are missing, damaged, or inconsistent.
    """
    # Read all files before writing any.
    images, labels = _read_pair(raw, "train")
    tests, answers = _read_pair(raw, "t10k")
    write_shards(
        root / "train",
        ((f"{i:05d}", {"png": encode_image(x), "txt": FASHION_TEMPLATES[i % 2].replace("{c}", FASHION[y]).encode(), "cls": str(y).encode()})
         for i, (x, y) in enumerate(zip(images, labels, strict=True))),
        5000,
    )  # fmt: skip
    samples = [
        (f"{i:05d}", {"png": encode_image(x), "cls": str(y).encode()})
        for i, (x, y) in enumerate(zip(tests, answers, strict=True))
    ]
    write_wds_layout(root / "zeroshot", samples, classnames=list(FASHION), templates=FASHION_TEMPLATES)
    return {"train": len(images), "zeroshot": len(tests)}


def read_idx(path: Path) -> np.ndarray:
    """Return an array in Yann LeCun's idx format, gzipped (unsigned bytes)."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. On Debian, run apt-get install dataset-fashion-mnist, or give the folder of the files with --raw FOLDER."
        )
    try:
        with gzip.open(path) as stream:
            data = stream.read()
        if data[:3] != b"\0\0\x08":
            raise DataError(f"{path}: not an idx file of unsigned bytes")
        shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise DataError(f"{path}: is damaged ({error}). Fetch it again.") from None


def _read_pair(raw: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(raw / f"{part}-images-idx3-ubyte.gz"), read_idx(raw / f"{part}-labels-idx1-ubyte.gz")
    if images.ndim != 3 or labels.shape != images.shape[:1] or (labels >= len(FASHION)).any():
        raise DataError(
            f"{raw}/{part}-*: not Fashion-MNIST: expected images (N, H, W) and N labels below {len(FASHION)}, got "
            f"images {images.shape} and labels {labels.shape}. Fetch them again."
        )
    return images, labels
