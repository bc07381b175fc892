"""ObSuRF's two sets of still scenes (Stelzner et al. 2021): CLEVR3D, and a MultiShapeNet of its own, three views of each."""

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

_LENS = {"camera_angle_x": float(2 * np.arctan(16 / 35))}  # Blender's camera of 35 mm before a sensor of 32
_VIEWS = 3
_MAX_DEPTH, _LEVELS = 40.0, 65536  # world units, and numbers of 16 bits, in which depth is written


class _SceneMetadata(NamedTuple):
    """Of N scenes.  places: (N, V, 3) fp64, of cameras.  counts: (N,), of objects, where it says so.  planar: depth is along a camera's
    axis, not along rays."""

    places: np.ndarray
    counts: np.ndarray | None
    planar: bool


def clevr3d_scenes(place: Path, scenes: Sequence[int] | None = None) -> Iterator[PublishedViews]:
    """A folder of metadata.npz with `camera_pos` (N, V, 3), images/img_SCENE_VIEW.png, and where they are masks/masks_SCENE_VIEW.png and
    depths/depths_SCENE_VIEW.png; cameras look at the origin with CLEVR's lens. Scenes without pictures are left out, so a part of the
    set can be read.

    Args:
        scenes: their numbers; None: all.

    Raises:
        DataError: no such table, no scene of these numbers, or a picture of it is damaged.
    """
    metadata = _read_metadata(place / "metadata.npz")
    numbers = range(len(metadata.places)) if scenes is None else scenes
    if len(numbers) and max(numbers[0], numbers[-1]) >= len(metadata.places):
        raise DataError(f"{place}: has {len(metadata.places)} scenes, and number {numbers[-1]} is asked of it")
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
        raise DataError(f"{where}: its camera looks straight down, and which way is up nobody says")
    far = _depth(depth, (height, width), lens if metadata.planar else None) if depth.is_file() else None
    return PublishedView(image, label, look_at(eye, (0, 0, 0)), lens, far)


def _depth(path: Path, shape: tuple[int, int], lens: np.ndarray | None) -> np.ndarray:
    """(H, W) fp32 along rays; of a `lens` the picture has it along the axis. Endless where the picture says no more than that it is far."""
    levels = decode_array(read_bytes(path, DataError), path, labels=True)
    if levels.ndim != 2 or levels.shape != shape or levels.dtype.itemsize < 2:
        raise DataError(
            f"{path}: is {levels.dtype} of {levels.shape}, not one number of 16 bits for each pixel of {shape}"
        )
    levels = levels.astype(np.int64)
    if levels.min() < 1 or levels.max() >= _LEVELS:
        raise DataError(
            f"{path}: has numbers from {levels.min()} to {levels.max()}; depth is in 1 to {_LEVELS - 1} "
            "(without the folder `depths` scenes are read without it)"
        )
    far = np.where(levels == _LEVELS - 1, np.inf, levels * (_MAX_DEPTH / _LEVELS))
    if lens is not None:
        fx, fy, cx, cy = lens
        x, y = (np.arange(shape[1]) + 0.5 - cx) / fx, (np.arange(shape[0]) + 0.5 - cy) / fy
        far = far * np.sqrt(1 + x[None] ** 2 + y[:, None] ** 2)
    return far.astype(np.float32)


def _read_metadata(table: Path) -> _SceneMetadata:
    """What metadata.npz says. Raises `DataError`."""
    try:
        with np.load(io.BytesIO(read_bytes(table, DataError)), allow_pickle=False) as archive:
            places = np.asarray(archive["camera_pos"], np.float64)
            shapes = np.asarray(archive["shape"]) if "shape" in archive.files else None
            planar = "shape_file" in archive.files  # the other set's mark, whose models come from files
    except DataError:
        raise
    except Exception as error:  # zip, zlib and numpy's headers raise anything
        raise DataError(f"{table}: has no camera_pos that can be read ({str(error)[:200]})") from None
    near = bool((np.abs(places) < MAX_DISTANCE).all())  # a NaN is not below it
    if places.ndim != 3 or places.shape[2] != 3 or places.shape[1] < _VIEWS or not near:
        raise DataError(
            f"{table}: camera_pos of {places.shape} is not (N, {_VIEWS} or more, 3) numbers below {MAX_DISTANCE:g}"
        )
    if shapes is not None and (shapes.ndim != 2 or len(shapes) != len(places) or shapes.dtype.kind not in "iuf"):
        raise DataError(
            f"{table}: shape of {shapes.dtype} {shapes.shape} is no number for each object of {len(places)} scenes"
        )
    return _SceneMetadata(places, None if shapes is None else (shapes > 0).sum(1), planar)
