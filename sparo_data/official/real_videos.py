"""Real videos with objects: DAVIS (Pont-Tuset et al. 2017) and YouTube-VIS (Yang et al. 2019), for slots on unposed videos."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sparo_train.core.errors import DataError
from sparo_train.core.files import is_safe_relative_path, read_bytes, read_json, read_text
from sparo_train.data.decode.decoding import is_rotated

from ..episodes import Video, compute_boxes
from .clips import natural_sort_key, sanitize_key
from .published import IGNORE, PublishedScene, decode_array
from .run_lengths import decode_run_lengths

logger = logging.getLogger(__name__)
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MAX_BYTES = 1 << 31  # limit of annotation files; that of YouTube-VIS 2021 has 0.4e9
# Resolutions of DAVIS' folders, the common one first.
_SIZES = ("480p", "Full-Resolution")
_MASKS = ("Annotations", "Annotations_unsupervised")


def davis(split: Path) -> Iterator[Video]:
    """Yield the videos of a split.

    Frames without an annotated object, and pixels of value 255, have no mask; videos of the test sets, where only the
    first frame is annotated or none, have no masks at all.

    Args:
        split: DAVIS/ImageSets/2017/train.txt, with JPEGImages and Annotations in DAVIS.

    Raises:
        DataError: a missing folder or image, a mask of another size, or an unsafe name.
    """
    root = split.parent.parent.parent
    size = next((name for name in _SIZES if (root / "JPEGImages" / name).is_dir()), None)
    if size is None:
        raise DataError(f"{root / 'JPEGImages'}: has no folder {' or '.join(_SIZES)}. Unpack DAVIS' images there.")
    for name in read_text(split, DataError).split():
        if not is_safe_relative_path(name):
            raise DataError(f"{split}: {name!r} is not the name of a video")
        frames = _frame_files(root / "JPEGImages" / size / name)
        masks = next((found for kind in _MASKS if (found := root / kind / size / name).is_dir()), None)
        planes = [] if masks is None else [masks / f"{frame.stem}.png" for frame in frames]
        there = [plane.is_file() for plane in planes]
        complete = bool(planes) and all(there)
        # The test sets have the first mask only.
        if any(there[1:]) and not complete:
            logger.warning(
                f"{masks}: lacks {there.count(False)} of {len(there)} masks, so this video is written without masks. Fetch DAVIS' annotations again."
            )
        labels = [_mask(plane) for plane in planes if complete]
        yield _video(name, frames, labels, {"dataset": "davis", "split": split.stem}, str(masks))


def _mask(path: Path) -> np.ndarray:
    """Return the object numbers of a frame; 255 stays the value of pixels that are not scored."""
    table = decode_array(read_bytes(path, DataError), path, labels=True)
    if table.ndim != 2 or table.dtype.kind not in "iub" or table.max(initial=0) > IGNORE:
        raise DataError(f"{path}: must be a palette or gray PNG of 8 bits. Fetch DAVIS' annotations again.")
    return table.astype(np.uint8)


def youtube_vis(annotations: Path) -> Iterator[Video]:
    """Yield the videos of a split; pixels of several objects, and of crowds, are not scored.

    Args:
        annotations: train.json or instances.json, with JPEGImages next to it, or in a folder of the file's name.

    Raises:
        DataError: another file, a missing image, or run lengths that do not match.
    """
    tree = read_json(annotations, dict, DataError, max_bytes=_MAX_BYTES)
    parent = annotations.parent
    folders = [parent / "JPEGImages", parent / annotations.stem / "JPEGImages", parent / annotations.stem]
    folder = next((place for place in folders if place.is_dir()), None)
    if folder is None:
        raise DataError(
            f"{annotations}: its folder of images is missing. Unpack the images to {folders[0]} or {folders[1]}."
        )
    try:
        classes = {int(one["id"]): str(one["name"]) for one in tree.get("categories") or ()}
        objects: dict[int, list[dict[str, Any]]] = {}
        for one in tree.get("annotations") or ():
            objects.setdefault(int(one["video_id"]), []).append(one)
        videos = [
            (int(v["id"]), [str(name) for name in v["file_names"]], (int(v["height"]), int(v["width"])))
            for v in tree["videos"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{annotations}: is not a YouTube-VIS annotation file ({type(error).__name__}: {error})"
        ) from None
    for number, names, side in videos:
        if not names or not all(is_safe_relative_path(name) for name in names):
            raise DataError(
                f"{annotations}: video {number} has no frames, or the path of a frame points outside of the folder"
            )
        # The whole path, because the frames of all videos may be in folders of one name (vid1/rgb, vid2/rgb).
        folders = str(PurePosixPath(names[0]).parent)
        key = str(number) if folders == "." else folders
        where, found = f"{annotations}: video {key}", objects.get(number, [])
        labels = _decode_outlines(found, len(names), side, where) if "annotations" in tree else []
        facts = [
            {"id": i + 1, "category": classes.get(int(one.get("category_id") or 0), "unknown")}
            for i, one in enumerate(found)
        ]
        yield _video(
            key,
            [folder / name for name in names],
            labels,
            {"dataset": "youtube_vis", "objects": facts},
            where,
            len(found),
        )


def _decode_outlines(objects: list[dict[str, Any]], times: int, side: tuple[int, int], where: str) -> list[np.ndarray]:
    """Return a label map for every frame from the run lengths of its objects."""
    if len(objects) >= IGNORE:
        raise DataError(f"{where}: expected at most {IGNORE - 1} objects, got {len(objects)}")
    labels, count = np.zeros((times, *side), np.uint8), np.zeros((times, *side), np.uint8)
    for number, one in enumerate(objects):
        shapes = one.get("segmentations")
        if not isinstance(shapes, list) or len(shapes) != times:
            raise DataError(f"{where}: object {number} does not have one segmentation for each of {times} frames")
        for t, shape in enumerate(shapes):
            if shape is None:  # not visible
                continue
            try:
                mask = decode_run_lengths(shape, side)
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{where}: object {number}, frame {t}: {error}") from None
            labels[t][mask] = number + 1
            count[t] += mask
            if one.get("iscrowd"):
                count[t][mask] = 2
    labels[count > 1] = IGNORE
    return list(labels)


def _video(
    name: str,
    frames: list[Path],
    labels: list[np.ndarray],
    metadata: dict[str, Any],
    where: str,
    count: int | None = None,
) -> Video:
    """Return a video of image files, whose bytes are kept as they are."""
    encoded = [read_bytes(path, DataError) for path in frames]
    for path, data, plane in zip(frames, encoded, labels, strict=False):
        if is_rotated(data):
            raise DataError(
                f"{where}: {path.name} is rotated by EXIF, but its mask is not. Write the frames without EXIF orientation."
            )
        if (shape := decode_array(data, path).shape[:2]) != plane.shape:
            raise DataError(f"{where}: masks have {plane.shape[::-1]} pixels, but {path.name} has {shape[::-1]}")
    sizes = {plane.shape for plane in labels}
    if len(sizes) > 1:
        raise DataError(f"{where}: masks of unequal sizes")
    planes = np.stack(labels) if labels else None
    highest = 0 if planes is None else int(planes[planes != IGNORE].max(initial=0))
    boxes = None if planes is None else compute_boxes(planes, highest if count is None else count)
    return Video(sanitize_key(name), encoded, planes, boxes, {"video": name, **metadata})


def _frame_files(folder: Path) -> list[Path]:
    """Return the frames of a folder in the order of their numbers, with or without leading zeros."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES] if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder}: has no JPEG or PNG files. Unpack the images of this video.")
    return sorted(files, key=lambda path: natural_sort_key(path.stem))


REAL_VIDEOS: dict[str, Callable[[Path], Iterator[Video]]] = {"davis": davis, "youtube_vis": youtube_vis}


def iter_frames(read: Callable[[Path], Iterator[Video]], place: Path) -> Iterator[PublishedScene]:
    """Yield every frame of the videos as an image."""
    for video in read(place):
        for t, data in enumerate(video.frames):
            image = decode_array(data, f"{video.key}, frame {t}") if isinstance(data, bytes) else data
            label = None if video.labels is None else video.labels[t]
            yield PublishedScene(f"{video.key}_{t:05d}", image, label, {**video.metadata, "frame": t})
