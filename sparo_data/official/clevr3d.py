"""ObSuRF's two sets of static scenes (Stelzner et al. 2021): CLEVR3D and its own MultiShapeNet, three views each."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparo_train.core.errors import DataError
from sparo_train.core.files import read_bytes
from sparo_train.data.video.cameras import look_at, parse_lens

from .published import decode_array, to_label_map
from .viewed import MAX_DISTANCE, PublishedView, PublishedViews

_LENS = {"camera_angle_x": float(2 * np.arctan(16 / 35))}  # Blender's camera with a 35 mm lens and a 32 mm sensor
_VIEWS = 3
_MAX_DEPTH, _LEVELS = 40.0, 65536  # world units, and 16-bit levels, in which depth is written


class _SceneMetadata(NamedTuple):
    """Metadata of N scenes.

    Attributes:
        places: (N, V, 3) fp64, camera positions.
        counts: (N,) number of objects, if given.
        planar: depth is along a camera's axis, not along rays.
    """

    places: np.ndarray
    counts: np.ndarray | None
    planar: bool


def clevr3d_scenes(place: Path, scenes: Sequence[int] | None = None) -> Iterator[PublishedViews]:
    """Yield the scenes of a folder.

    It has metadata.npz with `camera_pos` (N, V, 3), images/img_SCENE_VIEW.png, and optionally
    masks/masks_SCENE_VIEW.png and depths/depths_SCENE_VIEW.png. Cameras look at the origin with CLEVR's lens. Scenes
    without images are skipped, so that a part of the set can be read.

    Args:
        place: the folder.
        scenes: scene numbers; None: all.

    Raises:
        DataError: no such table, no scene with these numbers, or a damaged image.
    """
    metadata = _read_metadata(place / "metadata.npz")
    numbers = range(len(metadata.places)) if scenes is None else scenes
    if len(numbers) and max(numbers[0], numbers[-1]) >= len(metadata.places):
        raise DataError(f"{place}: has {len(metadata.places)} scenes, numbered from 0, got scene {numbers[-1]}")
    for scene in numbers:
        if not (place / f"images/img_{scene}_0.png").is_file():
            continue
        views = [_view(place, metadata, scene, view) for view in range(_VIEWS)]
        count = {} if metadata.counts is None else {"object_count": int(metadata.counts[scene])}
        yield PublishedViews(f"{scene:06d}", views, {"dataset": "clevr3d", **count})


def _view(place: Path, metadata: _SceneMetadata, scene: int, view: int) -> PublishedView:
    where, file = f"{place}: scene {scene}, view {view}", f"{scene}_{view}.png"
    image = decode_array(read_bytes(place / f"images/img_{file}", DataError), where)
    height, width = image.shape[:2]
    mask, depth = place / f"masks/masks_{file}", place / f"depths/depths_{file}"
    label = None
    if mask.is_file():
        label = to_label_map(decode_array(read_bytes(mask, DataError), mask, labels=True), where, True)
    lens = parse_lens(_LENS, width, height)
    eye = metadata.places[scene, view]
    if np.hypot(*eye[:2]) < 1e-6:
        raise DataError(f"{where}: its camera looks straight down, so its up direction is unknown")
    far = _depth(depth, (height, width), lens if metadata.planar else None) if depth.is_file() else None
    return PublishedView(image, label, look_at(eye, (0, 0, 0)), lens, far)


def _depth(path: Path, shape: tuple[int, int], lens: np.ndarray | None) -> np.ndarray:
    """Return (H, W) fp32 along rays, converted from along the axis if a `lens` is given; infinite if the image only says that it is far."""
    levels = decode_array(read_bytes(path, DataError), path, labels=True)
    if levels.ndim != 2 or levels.shape != shape or levels.dtype.itemsize < 2:
        raise DataError(
            f"{path}: expected one 16-bit value for each pixel of {shape}, got {levels.dtype} of {levels.shape}"
        )
    levels = levels.astype(np.int64)
    if levels.min() < 1 or levels.max() >= _LEVELS:
        raise DataError(
            f"{path}: expected depth in 1 to {_LEVELS - 1}, got values from {levels.min()} to {levels.max()}. To "
            "read scenes without depth, remove the folder `depths`."
        )
    far = np.where(levels == _LEVELS - 1, np.inf, levels * (_MAX_DEPTH / _LEVELS))
    if lens is not None:
        fx, fy, cx, cy = lens
        x, y = (np.arange(shape[1]) + 0.5 - cx) / fx, (np.arange(shape[0]) + 0.5 - cy) / fy
        far = far * np.sqrt(1 + x[None] ** 2 + y[:, None] ** 2)
    return far.astype(np.float32)


def _read_metadata(table: Path) -> _SceneMetadata:
    """Read metadata.npz. Raises `DataError`."""
    try:
        with np.load(io.BytesIO(read_bytes(table, DataError)), allow_pickle=False) as archive:
            places = np.asarray(archive["camera_pos"], np.float64)
            shapes = np.asarray(archive["shape"]) if "shape" in archive.files else None
            planar = "shape_file" in archive.files  # marks the other set, whose models come from files
    except DataError:
        raise
    except Exception as error:  # zip, zlib and numpy's header parser may raise anything
        raise DataError(f"{table}: has no readable camera_pos ({str(error)[:200]})") from None
    if places.ndim != 3 or places.shape[2] != 3 or places.shape[1] < _VIEWS:
        raise DataError(
            f"{table}: camera_pos: expected an array (scenes, views, 3) with at least {_VIEWS} views, got the shape "
            f"{places.shape}. Fetch the file again."
        )
    if not (np.abs(places) < MAX_DISTANCE).all():  # NaN, too
        raise DataError(
            f"{table}: camera_pos: expected numbers below {MAX_DISTANCE:g}, got {np.abs(places).max():g}. Fetch the file again."
        )
    if shapes is not None and (shapes.ndim != 2 or len(shapes) != len(places) or shapes.dtype.kind not in "iuf"):
        raise DataError(
            f"{table}: shape: expected a number for each object of {len(places)} scenes, got {shapes.dtype} {shapes.shape}"
        )
    return _SceneMetadata(places, None if shapes is None else (shapes > 0).sum(1), planar)
