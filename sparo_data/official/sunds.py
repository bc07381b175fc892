"""MultiShapeNet as in OSRT (MSN-Hard, MSN-Easy): TFDS' records in the format of google-research/sunds, read without TensorFlow.

A record is a frame of several cameras. `extrinsics` map the frame to a camera in OpenCV's convention, `pose` the frame
to the scene.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.decode.tfrecord import Value, parse_example, records
from sparo_train.data.video.cameras import parse_lens, parse_pose

from .clips import natural_sort_key, sanitize_key
from .published import decode_array, to_label_map
from .viewed import PublishedView, PublishedViews

_CAMERA = re.compile(r"cameras/(.+)/color_image")


def sunds_scenes(path: Path) -> Iterator[PublishedViews]:
    """Yield the scenes of one of TFDS' files, cameras ordered by number, with depth and instances if it has them.

    Instance 1 is MultiShapeNet's background, and 0 marks a few pixels of nothing. Both are 0 here, and objects begin at
    1.

    Raises:
        DataError: a truncated file, a record without cameras, a camera without a pose or a lens, or one that is
            distorted or not a pinhole.
    """
    for number, record in enumerate(records(path)):
        where = f"{path}: record {number}"
        features = parse_example(record, where)
        names = sorted({m[1] for key in features if (m := _CAMERA.fullmatch(key))}, key=natural_sort_key)
        if not names:
            raise DataError(
                f"{where}: has no feature cameras/NAME/color_image, got {', '.join(sorted(features)) or 'nothing'}"
            )
        scene = _text(features, "scene_name") or f"{path.stem}_{number:06d}"
        # Frames of one camera each are separate scenes in such files.
        frame = _text(features, "frame_name")
        name = scene if frame in (None, scene) else f"{scene}_{frame}"
        views = [_view(features, camera, f"{where}, {camera}") for camera in names]
        yield PublishedViews(sanitize_key(name), views, {"dataset": path.name.partition("-")[0], "scene": scene})


def _view(features: dict[str, Value], camera: str, where: str) -> PublishedView:
    own = f"cameras/{camera}"
    image = decode_array(_encoded_picture(features, f"{own}/color_image", where), where)
    height, width = image.shape[:2]
    kind = _text(features, f"{own}/intrinsics/type")
    if kind != "PERSPECTIVE":
        raise DataError(f"{where}: expected a camera of type PERSPECTIVE, got {kind}")
    for part in ("radial", "tangential"):
        distortion = features.get(f"{own}/intrinsics/distortion/{part}")
        if isinstance(distortion, np.ndarray) and distortion.any():
            raise DataError(
                f"{where}: the camera has lens distortion ({part} {distortion.tolist()}). Undistort the images first."
            )
    label = None
    if f"{own}/instance_image" in features:
        # All cameras of a scene see the same objects.
        plane = decode_array(_encoded_picture(features, f"{own}/instance_image", where), where, labels=True)
        instances = to_label_map(plane, where, True)
        label = np.where(instances > 0, instances - 1, 0).astype(np.uint8)
    depth = _depth(features, own, where) if f"{own}/depth_image" in features else None
    for plane in (label, depth):
        if plane is not None and plane.shape != (height, width):
            raise DataError(
                f"{where}: a mask or depth image of {plane.shape} does not match the image of {(height, width)} pixels"
            )
    scene_from_frame = _isometry(features, "pose", where)
    camera_from_frame = _isometry(features, f"{own}/extrinsics", where)
    matrix = _table(features, f"{own}/intrinsics/K", 9, where).reshape(3, 3)
    intrinsics = {"fl_x": matrix[0, 0], "fl_y": matrix[1, 1], "cx": matrix[0, 2], "cy": matrix[1, 2]}
    try:
        pose = parse_pose(scene_from_frame @ np.linalg.inv(camera_from_frame), "opencv")
        lens = parse_lens({name: float(value) for name, value in intrinsics.items()}, width, height)
    except (BadSampleError, np.linalg.LinAlgError) as bad:
        raise DataError(f"{where}: {bad}") from None
    return PublishedView(image, label, pose, lens, depth)


def _depth(features: dict[str, Value], own: str, where: str) -> np.ndarray:
    """Return (H, W) fp32 from a PNG whose four bytes per pixel are a float, as TFDS writes it."""
    try:
        with Image.open(
            io.BytesIO(_encoded_picture(features, f"{own}/depth_image", where)), formats=("PNG",)
        ) as picture:
            data = np.asarray(picture)
    except Exception as error:  # decoders of broken files may raise anything
        raise DataError(f"{where}: depth_image cannot be decoded as a PNG, got {error}") from None
    if data.ndim != 3 or data.shape[2] != 4:
        raise DataError(f"{where}: depth_image needs four bytes per pixel (an fp32 distance), got shape {data.shape}")
    depth = np.ascontiguousarray(data).view("<f4")[..., 0]
    if not (depth > 0).all():  # false for NaN, too
        raise DataError(f"{where}: depth_image has values that are NaN, zero or negative")
    return depth


def _isometry(features: dict[str, Value], name: str, where: str) -> np.ndarray:
    """Return the (4, 4) fp64 transform of a rotation R and a translation t."""
    transform = np.eye(4)
    transform[:3, :3] = _table(features, f"{name}/R", 9, where).reshape(3, 3)
    transform[:3, 3] = _table(features, f"{name}/t", 3, where)
    return transform


def _table(features: dict[str, Value], name: str, count: int, where: str) -> np.ndarray:
    table = features.get(name)
    if not isinstance(table, np.ndarray) or len(table) != count or not np.isfinite(table).all():
        raise DataError(f"{where}: {name} is not {count} finite numbers")
    return table.astype(np.float64)


def _encoded_picture(features: dict[str, Value], name: str, where: str) -> bytes:
    values = features.get(name)
    if not isinstance(values, list) or len(values) != 1:
        raise DataError(f"{where}: {name} needs one encoded picture, got {0 if values is None else len(values)} values")
    return values[0]


def _text(features: dict[str, Value], name: str) -> str | None:
    values = features.get(name)
    if isinstance(values, np.ndarray):  # single letters are read as bytes
        return values.astype(np.uint8).tobytes().decode(errors="replace") if len(values) == 1 else None
    return values[0].decode(errors="replace") if values else None
