"""Published videos: MOVi-A to F from TFDS' files with all their planes, and npy shards; one sample per video."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sparo_train.core.errors import DataError
from sparo_train.data.decode.tfrecord import Value

from ..episodes import MAX_LEVEL, QuantizedArray, Video, compute_boxes, episode_fields
from ..writer import Fields
from .clips import movi_records, npy_arrays, sanitize_key
from .published import PublishedConfig, WriteSummary, decode_array, to_label_map, write_test_and_train

# Object features that are class indices, and TFDS' class names in order (kubric, challenges/movi/movi_a.py to f).
# MOVi-A has the first three shapes, sizes and colours; B all shapes and a hue; C to F a category, and the name of the
# asset.
_WORDS = {
    "shape_label": ("cube", "cylinder", "sphere", "cone", "torus", "gear", "torus_knot", "sponge", "spot", "teapot", "suzanne"),
    "size_label": ("small", "large"),
    "color_label": ("blue", "brown", "cyan", "gray", "green", "purple", "red", "yellow"),
    "material_label": ("metal", "rubber"),
    "category": (
        "Action Figures", "Bag", "Board Games", "Bottles and Cans and Cups", "Camera", "Car Seat", "Consumer Goods", "Hat", "Headphones",
        "Keyboard", "Legos", "Media Cases", "Mouse", "None", "Shoe", "Stuffed Toys", "Toys",
    ),
}  # fmt: skip
_TABLES = {  # object features with values per frame
    "positions": 3, "quaternions": 4, "velocities": 3, "angular_velocities": 3, "image_positions": 2, "visibility": 1,
}  # fmt: skip
_NUMBERS = ("mass", "friction", "restitution", "scale", "is_dynamic")


def movi_videos(path: Path) -> Iterator[Video]:
    """Yield the videos of one of TFDS' files, with flows, depth, boxes, instances and camera if it has them (MOVi-B's copy lacks some).

    Raises:
        DataError: the file is truncated, contains no video, or has planes of other sizes.
    """
    for where, name, features in movi_records(path):
        frames = features["video"]
        masks = features["segmentations"]
        assert isinstance(frames, list) and isinstance(masks, list)
        pictures = _stack_planes([decode_array(data, f"{where}, frame {t}") for t, data in enumerate(frames)], where)
        labels = _stack_planes([to_label_map(decode_array(m, where, labels=True), where, True) for m in masks], where)
        times, height, width = labels.shape
        if pictures.shape[:3] != labels.shape:
            raise DataError(
                f"{where}: frames of {pictures.shape[1:3]} and segmentations of {labels.shape[1:]} pixels differ in size"
            )
        shape = (times, height, width)
        yield Video(
            sanitize_key(name),
            frames,
            labels,
            _boxes(features, times, where),
            {
                "dataset": path.name.partition("-")[0],
                "video": name,
                "objects": _objects(features, times, where),
                "camera": _camera(features, times, where),
            },
            _depth(features, shape, where),
            _flow(features, "backward_flow", shape, where),
            _flow(features, "forward_flow", shape, where),
        )


def npy_videos(path: Path) -> Iterator[Video]:
    """Yield the videos of a tar of `key.video.npy` and `key.segmentations.npy`. Raises `DataError` like `npy_arrays`."""
    for name, video, masks in npy_arrays(path):
        where = f"{path}: {name}"
        labels = None if masks is None else np.stack([to_label_map(m.astype(np.int64), where) for m in masks])
        # npy shards have no boxes, so they are derived from the masks.
        boxes = None if labels is None else compute_boxes(labels, int(labels.max(initial=0)))
        yield Video(sanitize_key(name), video, labels, boxes, {"video": name})


VIDEOS: dict[str, Callable[[Path], Iterator[Video]]] = {"movi": movi_videos, "npy": npy_videos}


def write_videos(
    out: Path, videos: Iterator[Video], config: PublishedConfig, on_progress: Callable[[int], None] = lambda count: None
) -> WriteSummary:
    """Write the first `test` videos to ROOT/clips, in the layout of evaluation sets, and the others to ROOT/train/*.tar.

    Raises:
        DataError: `out` contains something else already, or no video was found.
    """
    counts = {"all": 0, "empty": 0}

    def samples() -> Iterator[tuple[str, Fields]]:
        for video in islice(videos, config.limit):
            counts["all"] += 1
            counts["empty"] += video.labels is not None and not video.labels.any()
            yield video.key, episode_fields(resize_video(video, config.size))
            on_progress(counts["all"])

    return write_test_and_train(out, "clips", samples(), config, counts, "video")


def resize_video(video: Video, side: int | None) -> Video:
    """Resize a video to `side` pixels per side: colours by area and bicubic, other planes by nearest neighbours, with flows in new pixels."""
    if side is None:
        return video
    frames = [decode_array(f, video.key) if isinstance(f, bytes) else f for f in video.frames]
    height, width = frames[0].shape[:2]
    if (height, width) == (side, side):
        return video
    rows, columns = ((np.arange(side) + 0.5) * n / side for n in (height, width))
    near = np.ix_(rows.astype(int), columns.astype(int))
    # Smooth for colours only: the mean of two depths is a place where nothing is.
    small = np.stack([np.asarray(Image.fromarray(f).resize((side, side), Image.Resampling.BICUBIC)) for f in frames])

    def resize_plane(plane: QuantizedArray | None, scale: float = 1.0) -> QuantizedArray | None:
        return None if plane is None else QuantizedArray(plane.levels[:, *near], plane.low * scale, plane.high * scale)

    if height != width and (video.flow or video.forward):
        raise DataError(
            f"{video.key}: frames of {width} x {height} pixels have optical flow, which cannot be resized to a square. Remove --size."
        )
    return video._replace(
        frames=small,
        labels=None if video.labels is None else video.labels[:, *near],
        depth=resize_plane(video.depth),
        flow=resize_plane(video.flow, side / height),
        forward=resize_plane(video.forward, side / height),
    )


def _stack_planes(planes: list[np.ndarray], where: str) -> np.ndarray:
    sizes = {plane.shape for plane in planes}
    if len(sizes) != 1:
        raise DataError(f"{where}: frames have unequal sizes ({', '.join(str(s[1::-1]) for s in sorted(sizes))})")
    return np.stack(planes)


def _numbers(features: dict[str, Value], name: str, where: str, whole: bool = False) -> np.ndarray | None:
    """Return a feature of numbers, or None if the file lacks it. Raises `DataError` if they are not finite, or (`whole`) not integers."""
    table = features.get(name)
    if not isinstance(table, np.ndarray):
        return None
    if not np.isfinite(table).all() or (whole and table.dtype.kind not in "iu"):
        raise DataError(
            f"{where}: {name} has values that are not {'whole ' if whole else ''}numbers. Fetch the file again."
        )
    return table


def _range(features: dict[str, Value], name: str, where: str) -> tuple[float, float] | None:
    bounds = _numbers(features, f"metadata/{name}_range", where)
    if bounds is None:
        return None
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        values = ", ".join(f"{bound:g}" for bound in bounds[:4])
        raise DataError(
            f"{where}: metadata/{name}_range: expected two ascending numbers, got {values}. Fetch the file again."
        )
    return float(bounds[0]), float(bounds[1])


def _flow(features: dict[str, Value], name: str, shape: tuple[int, int, int], where: str) -> QuantizedArray | None:
    levels, bounds = _numbers(features, name, where, whole=True), _range(features, name, where)
    if levels is None or bounds is None:
        return None
    # Beyond 16 bits, numpy would wrap around to 0.
    if levels.size != 2 * int(np.prod(shape)) or levels.min(initial=0) < 0 or levels.max(initial=0) > MAX_LEVEL:
        raise DataError(f"{where}: {name} does not have two 16-bit values for each pixel")
    return QuantizedArray(levels.reshape(*shape, 2).astype(np.uint16), *bounds)


def _depth(features: dict[str, Value], shape: tuple[int, int, int], where: str) -> QuantizedArray | None:
    planes, bounds = features.get("depth"), _range(features, "depth", where)
    if not isinstance(planes, list) or bounds is None:
        return None
    levels = _stack_planes([decode_array(data, where, labels=True) for data in planes], where)
    if levels.dtype.itemsize < 2:
        raise DataError(
            f"{where}: depth: expected 16 bits a pixel, got {8 * levels.dtype.itemsize}. Fetch the file again."
        )
    if levels.shape != shape:
        raise DataError(f"{where}: depth of {levels.shape} does not match the video of {shape}")
    return QuantizedArray(levels.astype(np.uint16), *bounds)  # decoded images have at most 16 bits


def _boxes(features: dict[str, Value], times: int, where: str) -> np.ndarray | None:
    """Return (T, K, 4) boxes; TFDS lists an object's boxes for the frames in which it is visible."""
    flat = _numbers(features, "instances/bboxes/ragged_flat_values", where)
    of = _numbers(features, "instances/bboxes/ragged_row_lengths_0", where, whole=True)
    frames = _numbers(features, "instances/bbox_frames/ragged_flat_values", where, whole=True)
    if flat is None or of is None or frames is None:
        return None
    if (
        len(flat) != 4 * len(frames)
        or of.min(initial=0) < 0
        or of.sum() != len(frames)
        or (len(frames) and not 0 <= frames.min() <= frames.max() < times)
    ):
        raise DataError(f"{where}: instances/bboxes and bbox_frames do not match")
    # Zeros if an object is not visible, as in the format of episodes.
    table = np.zeros((times, len(of), 4), np.float32)
    table[frames, np.repeat(np.arange(len(of)), of)] = flat.reshape(-1, 4)
    return table


def _objects(features: dict[str, Value], times: int, where: str) -> list[dict[str, Any]]:
    """Return the instances as plain data, without features that the file lacks."""
    positions = _numbers(features, "instances/positions", where)
    count = 0 if positions is None else len(positions) // (3 * times)
    if positions is not None and positions.size % (3 * times):
        raise DataError(
            f"{where}: instances/positions: expected three values for each object in {times} frames, got {positions.size}"
        )
    objects: list[dict[str, Any]] = [{"id": number + 1} for number in range(count)]

    def read_rows(name: str, shape: tuple[int, ...], whole: bool = False) -> list[Any]:
        table = _numbers(features, f"instances/{name}", where, whole)
        if table is not None and table.size != math.prod(shape):
            raise DataError(f"{where}: instances/{name} has {table.size} values for {count} objects and {times} frames")
        return [] if table is None else table.reshape(shape).tolist()

    for name, words in _WORDS.items():
        for one, value in zip(objects, read_rows(name, (count,), whole=True), strict=False):
            # A larger number is a class of another set, whose name is unknown.
            one[name.removesuffix("_label")] = words[value] if 0 <= value < len(words) else str(value)
    for one, rgb in zip(objects, read_rows("color", (count, 3)), strict=False):
        one["rgb"] = rgb
    assets = features.get("instances/asset_id")
    for one, asset in zip(objects, assets if isinstance(assets, list) else (), strict=False):
        one["asset_id"] = asset.decode(errors="replace")
    for name in _NUMBERS:
        for one, value in zip(objects, read_rows(name, (count,)), strict=False):
            one[name] = float(value)
    for name, wide in _TABLES.items():
        if name == "quaternions":
            _refuse_no_rotation(_numbers(features, f"instances/{name}", where), f"{where}: instances/{name}")
        for one, rows in zip(objects, read_rows(name, (count, times, wide)[: 2 + (wide > 1)]), strict=False):
            one[name] = rows
    return objects


def _camera(features: dict[str, Value], times: int, where: str) -> dict[str, Any]:
    """Return `fov` in degrees, and the camera's pose in every frame in the convention of OpenGL and Blender (looking along -z)."""
    camera: dict[str, Any] = {}
    fov = _numbers(features, "camera/field_of_view", where)
    if fov is not None:
        if len(fov) != 1:
            raise DataError(f"{where}: camera/field_of_view: expected one value, got {len(fov)}. Fetch the file again.")
        camera["fov"] = float(np.degrees(fov[0]))
    for name, wide in (("positions", 3), ("quaternions", 4)):
        table = _numbers(features, f"camera/{name}", where)
        if table is None:
            continue
        if table.size != times * wide:
            raise DataError(
                f"{where}: camera/{name}: expected {times * wide} values ({wide} for each of {times} frames), got {table.size}. "
                "Fetch the file again."
            )
        if name == "quaternions":
            _refuse_no_rotation(table, f"{where}: camera/{name}")
        camera[name] = table.reshape(times, wide).tolist()
    return camera


def _refuse_no_rotation(table: np.ndarray | None, where: str) -> None:
    """Raise `DataError` for zero quaternions, which describe no rotation."""
    if table is not None and table.size % 4 == 0 and (np.abs(table.reshape(-1, 4)).max(1, initial=0) < 1e-6).any():
        raise DataError(f"{where}: a quaternion of zeros describes no rotation. Fetch the file again.")
