"""Writer of videos in the format of `sparo_train/data/video/episode.py`, for generated and published sets."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparo_train.data.video.episode import PLANES, member
from sparo_train.data.video.views import view_member

from .writer import encode_image

MAX_LEVEL = 65535  # largest 16-bit value
MAX_DEPTH = 100.0  # largest depth that differs from the sky


class QuantizedArray(NamedTuple):
    """Per-frame values with 16 bits: levels (T, …) uint16, and the values of levels 0 and 65535."""

    levels: np.ndarray
    low: float
    high: float


class Video(NamedTuple):
    """A video.

    Attributes:
        frames: (T, H, W, 3) uint8, or encoded images.
        labels: (T, H, W) uint8.
        boxes: (T, K, 4).
        depth: (T, H, W).
        flow, forward: (T, H, W, 2), rows and columns.
        metadata: content of the JSON.
    """

    key: str
    frames: np.ndarray | list[bytes]
    labels: np.ndarray | None
    boxes: np.ndarray | None
    metadata: dict[str, Any]
    depth: QuantizedArray | None = None
    flow: QuantizedArray | None = None
    forward: QuantizedArray | None = None


def quantize(values: np.ndarray) -> QuantizedArray:
    """Quantize fp32 values to 16 bits between their minimum and maximum (as in MOVi); constant values get a range of 1."""
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    return QuantizedArray(np.round((values - low) / (high - low) * MAX_LEVEL).astype(np.uint16), low, high)


def episode_fields(video: Video) -> dict[str, bytes]:
    """Return the members of an episode's sample."""
    fields: dict[str, bytes] = {}
    ranges: dict[str, list[float]] = {}
    for t, frame in enumerate(video.frames):
        fields[member(t)] = frame if isinstance(frame, bytes) else encode_image(np.ascontiguousarray(frame))
        if video.labels is not None:
            fields[member(t, "mask")] = encode_image(np.ascontiguousarray(video.labels[t]))
        for plane in PLANES[1:]:
            quantized: QuantizedArray | None = getattr(video, plane)
            if quantized is not None:
                levels = quantized.levels[t]
                # Rows above columns: a grey image, which every viewer opens.
                fields[member(t, plane)] = encode_image(
                    np.concatenate(list(np.moveaxis(levels, -1, 0))) if levels.ndim == 3 else levels
                )
                ranges[plane] = [quantized.low, quantized.high]
    if video.boxes is not None:
        stream = io.BytesIO()
        np.save(stream, video.boxes.astype(np.float32))
        fields["boxes.npy"] = stream.getvalue()
    metadata = {**video.metadata, "frames": len(video.frames), "ranges": ranges}
    return {**fields, "json": json.dumps(metadata).encode()}


def scene_fields(views: Sequence[Video], metadata: dict[str, Any]) -> dict[str, bytes]:
    """Return the members of a scene with several cameras (`sparo_train/data/video/views.py`), an episode of each.

    Args:
        views: the cameras' videos, with one common range of depth, because there is one JSON.
        metadata: content of the JSON: cameras, objects, …
    """
    fields: dict[str, bytes] = {}
    view_metadata: dict[str, Any] = {}
    for number, view in enumerate(views):
        own = episode_fields(view)
        # Every view has the same times and ranges, so one JSON is kept.
        view_metadata = json.loads(own.pop("json"))
        fields |= {view_member(number, name): data for name, data in own.items()}
    return {
        **fields,
        "json": json.dumps({**metadata, "frames": view_metadata["frames"], "ranges": view_metadata["ranges"]}).encode(),
    }


def compute_boxes(labels: np.ndarray, count: int) -> np.ndarray:
    """Return (T, K, 4) fp32 boxes in 0..1 of (T, H, W) labels 1..K, with zeros if an object is not visible."""
    height, width = labels.shape[1:]
    boxes = np.zeros((len(labels), count, 4), np.float32)
    for t, plane in enumerate(labels):
        for number in range(count):
            rows, columns = np.nonzero(plane == number + 1)
            if len(rows):
                boxes[t, number] = (
                    rows.min() / height,
                    columns.min() / width,
                    (rows.max() + 1) / height,
                    (columns.max() + 1) / width,
                )
    return boxes
