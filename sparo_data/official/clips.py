"""Videos with masks as still images: MOVi from TFDS files, and npy shards of videosaur and SlotContrast; one scene per frame."""

from __future__ import annotations

import gzip
import io
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sparo_train.core.errors import DataError
from sparo_train.data.decode.tfrecord import parse_example, records

from .published import PublishedScene, decode_array, to_label_map

_MAX_BYTES = 4 << 30  # limit in bytes for an array: a minute of video with 1,024 pixels
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def movi(path: Path) -> Iterator[PublishedScene]:
    """Yield the frames of MOVi-A … F in one of TFDS' files (movi_a-train.tfrecord-00000-of-…), with encoded frames and segmentations.

    Raises:
        DataError: the file is truncated, or contains no video.
    """
    for where, name, features in movi_records(path):
        for t, (frame, mask) in enumerate(zip(features["video"], features["segmentations"], strict=True)):
            at = f"{where}, frame {t}"
            label = to_label_map(decode_array(mask, at, labels=True), at)
            yield PublishedScene(
                f"{sanitize_key(name)}_{t:03d}", decode_array(frame, at), label, {"video": name, "frame": t}
            )


def movi_records(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name for errors, name of the video, its features, among them a video and as many segmentations).

    Raises:
        DataError: the file is truncated, or contains no video.
    """
    for number, record in enumerate(records(path)):
        where = f"{path}: record {number}"
        features = parse_example(record, where)
        frames, masks = features.get("video"), features.get("segmentations")
        if not isinstance(frames, list) or not isinstance(masks, list) or len(frames) != len(masks) or not frames:
            raise DataError(
                f"{where}: needs the fields `video` and `segmentations` (one segmentation per frame), got the fields "
                f"{', '.join(sorted(features)) or 'nothing'}"
            )
        names = features.get("metadata/video_name")
        yield (
            where,
            names[0].decode(errors="replace") if isinstance(names, list) and names else f"{path.stem}_{number:06d}",
            features,
        )


def npy_shards(path: Path) -> Iterator[PublishedScene]:
    """Yield the frames of a tar in the format of `npy_arrays`."""
    for name, video, masks in npy_arrays(path):
        for t, frame in enumerate(video):
            label = None if masks is None else to_label_map(masks[t].astype(np.int64), f"{path}: {name}, frame {t}")
            yield PublishedScene(f"{sanitize_key(name)}_{t:03d}", frame, label, {"video": name, "frame": t})


def npy_arrays(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """Yield name, video and segmentations in a tar of `key.video.npy` (T, H, W, 3) uint8 and `key.segmentations.npy` (T, H, W); `.npy.gz` as well.

    Raises:
        DataError: the tar is truncated, or arrays have other shapes.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            arrays: dict[str, Any] = {}
            for member in tar:
                # A key ends at the first dot of its name, as in webdataset's layout.
                at, (stem, _, field) = PurePosixPath(member.name), PurePosixPath(member.name).name.partition(".")
                key = str(at.parent / stem)  # folders are part of a name: train/0 and val/0 are different
                if arrays.get("key") != key:
                    yield from _check_arrays(arrays, path)
                    arrays = {"key": key}
                if member.isfile() and field.removesuffix(".gz") in ("video.npy", "segmentations.npy"):
                    stream = tar.extractfile(member)
                    assert stream is not None  # a file
                    if field.split(".")[0] in arrays:
                        raise DataError(
                            f"{path}: {member.name}: the tar contains this array twice. Remove one of them."
                        )
                    arrays[field.split(".")[0]] = _array(stream.read(), field, f"{path}: {member.name}")
            yield from _check_arrays(arrays, path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path}: {error}. Fetch the file again.") from None


def _array(data: bytes, field: str, where: str) -> np.ndarray:
    try:
        raw = io.BytesIO(data)
        with gzip.GzipFile(fileobj=raw) if field.endswith(".gz") else raw as stream:
            shape, order, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
            # Check before allocating, because a few bytes can announce terabytes, or unpack to gigabytes.
            size = math.prod(shape) * dtype.itemsize
            if dtype.kind not in "biu" or size > _MAX_BYTES:
                raise DataError(
                    f"{where}: expected an array of integers that takes at most {_MAX_BYTES >> 30} GB, got {dtype} {shape}"
                )
            content = stream.read(size + 1)
            if len(content) != size or not size:
                raise DataError(
                    f"{where}: {dtype} {shape} needs {size} bytes, got {len(content)}. Fetch the file again."
                )
            return np.frombuffer(content, dtype).reshape(shape, order="F" if order else "C")
    except DataError:
        raise
    except Exception as error:  # numpy evaluates a header as a Python literal, which may raise anything
        raise DataError(f"{where}: is not an array of numbers ({type(error).__name__}: {str(error)[:200]})") from None


def _check_arrays(arrays: dict[str, Any], path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    if "video" not in arrays:
        if "segmentations" in arrays:
            raise DataError(
                f"{path}: {arrays['key']}: has segmentations but no video. Members of one key must follow each other in "
                "the tar."
            )
        return
    video, masks, name = arrays["video"], arrays.get("segmentations"), arrays["key"]
    if masks is not None and masks.ndim == 4 and masks.shape[-1] == 1:
        masks = masks[..., 0]
    if (
        video.ndim != 4
        or video.shape[-1] != 3
        or video.dtype != np.uint8
        or (masks is not None and masks.shape != video.shape[:3])
    ):
        shapes = f"{video.dtype} {video.shape} and {None if masks is None else masks.shape}"
        raise DataError(
            f"{path}: {name}: expected a uint8 video (T, H, W, 3) and segmentations (T, H, W), got {shapes}"
        )
    yield name, video, masks


def sanitize_key(name: str) -> str:
    """Turn a name into a key of a shard: letters, digits, - and _ are kept."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def natural_sort_key(name: str) -> tuple[str, int, str]:
    """Sort camera_10 after camera_9. Digits are compared by length first, because Python refuses numbers with thousands of digits."""
    match = re.search(r"0*(\d*)$", name)
    assert match is not None
    return name[: match.start()], len(match[1]), match[1]
