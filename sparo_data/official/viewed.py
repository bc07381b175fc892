"""Published scenes with several posed cameras: their common form, writing, and folders in the convention of Blender and NeRF."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import read_bytes, read_json
from sparo_train.data.video.cameras import Convention, parse_lens, parse_pose

from ..episodes import MAX_DEPTH, QuantizedArray, Video, quantize, scene_fields
from ..writer import Fields
from .clips import sanitize_key
from .published import PublishedConfig, WriteSummary, decode_array, write_test_and_train
from .videos import resize_video

logger = logging.getLogger(__name__)

_NAMES = ("transforms.json", "transforms_train.json", "transforms_val.json", "transforms_test.json")
_DISTORTION_KEYS = ("k1", "k2", "k3", "k4", "k5", "k6", "p1", "p2", "distortion_params")
_PINHOLES = (
    "OPENCV",
    "PINHOLE",
    "SIMPLE_PINHOLE",
    "PERSPECTIVE",
)  # camera models of nerfstudio and COLMAP that are, or may be, pinholes
_LENS = ("fl_x", "fl_y", "cx", "cy", "w", "h", "camera_angle_x", "camera_angle_y", "fov")
MAX_DISTANCE = 1e6  # largest distance of cameras from the origin


class PublishedView(NamedTuple):
    """View of one camera.

    Attributes:
        image: (H, W, 3).
        label: (H, W) uint8.
        pose: (4, 4), OpenGL's.
        lens: fx, fy, cx, cy in pixels of the image.
        depth: (H, W) fp32, along the ray.
    """

    image: np.ndarray
    label: np.ndarray | None
    pose: np.ndarray
    lens: np.ndarray
    depth: np.ndarray | None = None


class PublishedViews(NamedTuple):
    """A static scene, with the content of its JSON (`metadata`)."""

    key: str
    views: list[PublishedView]
    metadata: dict[str, Any]


def nerf_scenes(place: Path) -> Iterator[PublishedViews]:
    """Yield the scenes of a folder with transforms.json (or transforms_train.json, …, each a scene), or of a folder of such folders, by name.

    Frames without a suffix are .png, and transparent images are composited on white, as in NeRF's synthetic scenes.

    Raises:
        DataError: there is none, an image is missing, a pose or lens is invalid, or a lens is distorted.
    """
    folders = (
        [place]
        if any((place / name).is_file() for name in _NAMES)
        else sorted(p for p in place.iterdir() if p.is_dir())
    )
    # Train, val and test of one scene are separate samples, because their cameras are not meant to be mixed. Either all
    # of them are scored, or none.
    files = [folder / name for folder in folders for name in _NAMES if (folder / name).is_file()]
    if not files:
        raise DataError(f"{place}: no transforms.json in this folder or its subfolders")
    for path in files:
        transforms = read_json(path, dict, DataError)
        frames = transforms.get("frames")
        if not isinstance(frames, list) or not frames:
            raise DataError(f"{path}: has no frames")
        part = path.stem.removeprefix("transforms").lstrip("_")
        name = path.parent.resolve().name  # `.` has no name
        views = [_frame(path, number, transforms, frame) for number, frame in enumerate(frames)]
        metadata = {"dataset": name, "scene": name, **_near_far(path, transforms)}
        yield PublishedViews(sanitize_key(name + (f"_{part}" if part else "")) or "scene", views, metadata)


def _near_far(path: Path, transforms: dict[str, Any]) -> dict[str, float]:
    """Return `near` and `far` of a transforms.json, which some exporters write. Raises `DataError` unless 0 < near < far."""
    near, far = transforms.get("near"), transforms.get("far")
    if near is None and far is None:
        return {}
    if not isinstance(near, int | float) or not isinstance(far, int | float) or not 0 <= near < far < MAX_DISTANCE:
        raise DataError(f"{path}: expected 0 < near < far, got near={near!r} and far={far!r}. Correct them.")
    return {"near": float(near), "far": float(far)}


def _frame(path: Path, number: int, transforms: dict[str, Any], frame: Any) -> PublishedView:
    where = f"{path}: frame {number}"
    if not isinstance(frame, dict) or not isinstance(frame.get("file_path"), str) or not frame["file_path"]:
        raise DataError(f"{where}: has no file_path")
    _refuse_distortion(where, {**transforms, **frame})
    for key in ("mask_path", "depth_file_path"):
        if key in frame and number == 0:
            logger.warning(f"{path}: {key} is ignored; the scenes are written without object masks and depth")
    image = decode_array(_picture(path, where, frame["file_path"]), where)
    lens = {name: frame.get(name, transforms.get(name)) for name in _LENS if name in frame or name in transforms}
    try:
        pose = parse_pose(frame.get("transform_matrix"), _convention(where, transforms))
        return PublishedView(image, None, pose, parse_lens(lens, image.shape[1], image.shape[0]))
    except BadSampleError as bad:
        raise DataError(f"{where}: {bad}. Correct it, or remove the frame.") from None


def _convention(where: str, transforms: dict[str, Any]) -> Convention:
    """Return the axes of the cameras: OpenGL's, as in Blender and instant-ngp, unless the file says otherwise."""
    given = transforms.get("convention", transforms.get("camera_convention", "opengl"))
    if not isinstance(given, str) or (name := given.lower()) not in get_args(Convention):
        raise DataError(
            f"{where}: convention must be one of {', '.join(get_args(Convention))}, got {given!r}. Correct it."
        )
    return cast(Convention, name)


def _refuse_distortion(where: str, camera_params: dict[str, Any]) -> None:
    """Raise `DataError` for a lens that is not a pinhole, for all frames or for this one."""
    for name in _DISTORTION_KEYS:
        distortion = camera_params.get(name)
        if any(distortion) if isinstance(distortion, list) else distortion:
            raise DataError(
                f"{where}: the camera has lens distortion ({name}={distortion}). Undistort the images first."
            )
    model = camera_params.get("camera_model", "PINHOLE")
    if model not in _PINHOLES or camera_params.get("is_fisheye"):
        what = f"camera_model={model}" if model not in _PINHOLES else "is_fisheye"
        raise DataError(
            f"{where}: {what} does not describe a pinhole camera. Undistort the images to a pinhole camera first."
        )


def _picture(path: Path, where: str, name: str) -> bytes:
    picture = path.parent / name
    ending = "" if picture.suffix else "; without a suffix, .png is assumed"
    try:
        # Add the suffix before resolving the path, because `.` and `..` would otherwise become names outside the
        # folder.
        picture = picture.with_name(f"{picture.name}.png") if ending else picture
        inside = picture.resolve().is_relative_to(path.parent.resolve())
    except (OSError, ValueError) as error:  # a NUL, or a loop of links
        raise DataError(f"{where}: file_path {name!r} is not a path ({error})") from None
    if not inside:
        raise DataError(f"{where}: file_path {name!r} points outside the folder of {path.name}")
    try:
        return read_bytes(picture, DataError)
    except DataError as error:
        raise DataError(f"{where}: {error}{ending}") from None


def write_multi_view(
    out: Path,
    scenes: Iterator[PublishedViews],
    config: PublishedConfig,
    on_progress: Callable[[int], None] = lambda count: None,
) -> WriteSummary:
    """Write the first `test` scenes to ROOT/scenes, in the layout of evaluation sets, and the others to ROOT/train/*.tar.

    Raises:
        DataError: `out` contains something else already, or no scene was found.
    """
    counts = {"all": 0, "empty": 0}

    def samples() -> Iterator[tuple[str, Fields]]:
        selected = (s for s in scenes if config.max_objects is None or _count_objects(s) <= config.max_objects)
        for scene in islice(selected, config.limit):
            counts["all"] += 1
            labels = [view.label for view in scene.views if view.label is not None]
            counts["empty"] += bool(labels) and not any(label.any() for label in labels)
            yield scene.key, multi_view_fields(_override_near_far(scene, config), config.size)
            on_progress(counts["all"])

    return write_test_and_train(out, "scenes", samples(), config, counts, "scene")


def _override_near_far(scene: PublishedViews, config: PublishedConfig) -> PublishedViews:
    """Replace the scene's distances by those of the command."""
    if config.near is None or config.far is None:
        return scene
    return scene._replace(metadata={**scene.metadata, "near": config.near, "far": config.far})


def _count_objects(scene: PublishedViews) -> int:
    if "object_count" not in scene.metadata:
        raise DataError(f"{scene.key}: its number of objects is unknown. Remove --max-objects.")
    return scene.metadata["object_count"]


def multi_view_fields(scene: PublishedViews, size: int | None) -> dict[str, bytes]:
    """Return the members of a scene's sample, resized to `size` pixels per side if given; lenses are in pixels of the written images."""
    videos, cameras = [], []
    depths, bounds = _depths(scene)
    for view, depth in zip(scene.views, depths, strict=True):
        height, width = view.image.shape[:2]
        label = None if view.label is None else view.label[None]
        if label is not None and label.shape[1:] != (height, width):
            raise DataError(
                f"{scene.key}: a mask of {label.shape[1:]} does not match its image of {(height, width)} pixels"
            )
        videos.append(resize_video(Video(scene.key, view.image[None], label, None, {}, depth), size))
        fx, fy, cx, cy = view.lens.tolist()
        intrinsics = {"w": width, "h": height, "fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy}
        cameras.append({**intrinsics, "poses": [view.pose.tolist()]})
    # Values of the scene or the command take precedence over those from depth.
    return scene_fields(videos, {**bounds, **scene.metadata, "convention": "opengl", "cameras": cameras})


def _depths(scene: PublishedViews) -> tuple[list[QuantizedArray | None], dict[str, float]]:
    """Return each view's depth in one common range, because there is one JSON, and the nearest and farthest distance."""
    depths = [view.depth for view in scene.views]
    planes = [np.minimum(depth, MAX_DEPTH) for depth in depths if depth is not None]
    if len(planes) < len(depths):
        return [None] * len(depths), {}
    quantized = quantize(np.concatenate([plane.reshape(-1) for plane in planes]))
    ends = np.cumsum([0, *(plane.size for plane in planes)])
    rows = [
        quantized._replace(levels=quantized.levels[a:b].reshape(1, *plane.shape))
        for a, b, plane in zip(ends, ends[1:], planes, strict=False)
    ]
    visible_depths = np.concatenate([depth[depth < MAX_DEPTH] for depth in planes])
    bounds = (
        {"near": round(float(visible_depths.min()), 4), "far": round(float(visible_depths.max()), 4)}
        if len(visible_depths)
        else {}
    )
    return list(rows), bounds
