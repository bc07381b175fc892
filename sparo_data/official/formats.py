"""Published formats by name, and their conversion to shards."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparo_train.core.errors import ConfigError, DataError, did_you_mean
from sparo_train.data.decode.tfrecord import Value, parse_example, records

from .clevr3d import clevr3d_scenes
from .clips import movi, npy_shards
from .folders import clevr, clevrtex, coco
from .lmdb_file import lmdb_scenes
from .published import PublishedConfig, PublishedScene, WriteSummary, to_label_map, write_published
from .real_videos import REAL_VIDEOS, davis, iter_frames, youtube_vis
from .sunds import sunds_scenes
from .videos import VIDEOS, write_videos
from .viewed import PublishedViews, nerf_scenes, write_multi_view


# google-deepmind/multi_object_datasets (CLEVR with masks, Tetrominoes, Objects Room, Multi-dSprites) from its
# TFRecords. The meaning of attribute numbers is not published, so they are kept as numbers, under the files' own names.
class MultiObjectSet(NamedTuple):
    """Properties of a set.

    Attributes:
        side: height and width, which the files do not contain.
        background: number of entities that are not objects.
        entities_last: masks are (H, W, K).
    """

    side: tuple[int, int]
    background: int = 1
    entities_last: bool = False


SETS = {
    "clevr_with_masks": MultiObjectSet((240, 320)),
    "tetrominoes": MultiObjectSet((35, 35)),
    "objects_room": MultiObjectSet((64, 64), background=4),  # floor, sky and two walls
    "objects_room_background": MultiObjectSet((64, 64), background=0),  # the four have labels, too
    "multi_dsprites": MultiObjectSet((64, 64), entities_last=True),
}


def multi_object(path: Path, name: str) -> Iterator[PublishedScene]:
    """Yield the scenes of one file.

    Raises:
        DataError: the file is truncated, or of another set.
    """
    for number, record in enumerate(records(path)):
        where = f"{path}: record {number}"
        yield _scene(parse_example(record, where), SETS[name], f"{path.name.partition('.')[0]}_{number:08d}", where)


def _scene(features: dict[str, Value], s: MultiObjectSet, key: str, where: str) -> PublishedScene:
    height, width = s.side
    image, masks = (_bytes(features, field, where) for field in ("image", "mask"))
    if len(image) == height * width:  # the binarized Multi-dSprites are gray
        image = np.repeat(image, 3)
    if len(image) != height * width * 3 or not len(masks) or len(masks) % (height * width):
        raise DataError(
            f"{where}: image has {len(image)} bytes and mask has {len(masks)}, which does not fit {height} x {width} "
            "pixels. Check whether the files belong to another set."
        )
    count = len(masks) // (height * width)
    shares = (
        masks.reshape(height, width, count).transpose(2, 0, 1)
        if s.entities_last
        else masks.reshape(count, height, width)
    )
    # Masks are smooth at edges and overlap there, so a pixel belongs to the largest.
    label = to_label_map(np.maximum(shares.argmax(0).astype(np.int64) - s.background + 1, 0), where)
    return PublishedScene(key, image.reshape(height, width, 3), label, {"objects": _objects(features, s, count)})


def _objects(features: dict[str, Value], s: MultiObjectSet, count: int) -> list[dict[str, Any]]:
    objects = []
    # Every array with one number per entity is metadata, under the file's own name.
    factors = {name: np.asarray(value).reshape(count, -1) for name, value in features.items()
               if name not in ("image", "mask") and isinstance(value, np.ndarray) and value.size and value.size % count == 0}  # fmt: skip
    there = factors.get("visibility")
    for k in range(s.background, count):
        if there is None or there[k, 0] > 0:
            row = {name: values[k].tolist() for name, values in factors.items()}
            objects.append({"id": k - s.background + 1, **{n: v[0] if len(v) == 1 else v for n, v in row.items()}})
    return objects


def _bytes(features: dict[str, Value], field: str, where: str) -> np.ndarray:
    value = features.get(field)
    if isinstance(value, list) and len(value) == 1:  # one string for all pixels
        value = np.frombuffer(value[0], np.uint8)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        raise DataError(
            f"{where}: has no field {field!r} that contains bytes, got the fields "
            f"{', '.join(sorted(features)) or 'nothing'}. Check whether the files belong to another set."
        )
    return value


MULTI_VIEW_READERS: dict[str, Callable[[Path], Iterator[PublishedViews]]] = {
    "nerf": nerf_scenes, "clevr3d": clevr3d_scenes, "sunds": sunds_scenes
}  # fmt: skip


class Format(NamedTuple):
    """A published format.

    Attributes:
        read: yields the scenes of one source; None: all scenes have several cameras (viewed.py).
        what: description of the source.
        suffix: suffix of such files in a folder; empty: the source is a folder or one file.
    """

    read: Callable[[Path], Iterator[PublishedScene]] | None
    what: str
    suffix: str = ""


FORMATS: dict[str, Format] = {
    **{
        name: Format(partial(multi_object, name=name), "*.tfrecords of multi_object_datasets", "tfrecord")
        for name in SETS
    },
    "movi": Format(
        movi, "TFDS' *.tfrecord-* of MOVi-A to F, one image per frame, or whole videos with --videos", "tfrecord"
    ),
    "npy": Format(
        npy_shards,
        "tars of key.video.npy and key.segmentations.npy, one image per frame, or whole videos with --videos",
        ".tar",
    ),
    "clevr": Format(clevr, "CLEVR_v1.0/scenes/CLEVR_SPLIT_scenes.json"),
    "clevrtex": Format(clevrtex, "CLEVRTex' folder of images, *_flat.png and *.json"),
    "coco": Format(coco, "COCO's instances_SPLIT.json, with SPLIT/*.jpg next to its folder"),
    "nerf": Format(None, "folders of transforms.json with images (Blender's, NeRF's, nerfstudio's), one scene each"),
    "clevr3d": Format(None, "ObSuRF's folder of metadata.npz, images and masks"),
    "sunds": Format(None, "TFDS' *.tfrecord-* of MultiShapeNet (MSN-Hard, MSN-Easy), one scene per record", "tfrecord"),
    "davis": Format(
        partial(iter_frames, davis),
        "DAVIS/ImageSets/2017/SPLIT.txt with JPEGImages and Annotations, one image per frame, or whole videos with --videos",
    ),
    "youtube_vis": Format(
        partial(iter_frames, youtube_vis),
        "YouTube-VIS' train.json or instances.json with JPEGImages, one image per frame, or whole videos with --videos",
    ),
    "lmdb": Format(lmdb_scenes, "*.lmdb of images of the Genera1Z family", ".lmdb"),
}


def find_source_files(place: Path, name: str) -> list[Path]:
    """Return the files of a format at `place`, sorted by name.

    Raises:
        ConfigError: no such format.
        DataError: no such files.
    """
    if name not in FORMATS:
        raise ConfigError(f"--as {name}: {did_you_mean(name, FORMATS)}")
    kind = FORMATS[name]
    split = sorted(place.parent.glob(f"{glob.escape(place.name)}.tfrecord*")) if kind.suffix == "tfrecord" else []
    if split and not place.exists():
        return split
    if not place.exists():
        raise DataError(f"{place}: no such file or folder; --as {name} reads {kind.what}")
    if place.is_file() and name in MULTI_VIEW_READERS and not kind.suffix:
        raise DataError(f"{place}: is a file; --as {name} reads {kind.what}")
    if place.is_dir() and name in ("clevr", "coco", *REAL_VIDEOS):
        raise DataError(f"{place}: is a folder; --as {name} reads {kind.what}")
    if not kind.suffix or place.is_file() or (place / "data.mdb").is_file():
        return [place]
    files = sorted(p for p in place.iterdir() if p.is_file() and kind.suffix in p.name)
    if not files:
        raise DataError(f"{place}: expected {kind.what}, found none")
    parts = sorted({p.name.partition(kind.suffix)[0].rstrip(".") for p in files}) if kind.suffix == "tfrecord" else []
    if len(parts) > 1:
        raise DataError(
            f"{place}: contains several splits ({', '.join(parts)}), which would mix. Give one of them, such as {place / parts[0]}."
        )
    return files


def _refuse_bounds(config: PublishedConfig) -> None:
    """Raise `ConfigError` unless near and far are two ascending numbers for scenes that need them."""
    near, far = config.near, config.far
    if near is None and far is None:
        return
    if config.source not in ("nerf", "clevr3d"):
        raise ConfigError(f"--near, --far: apply to --as nerf and clevr3d, not to {config.source}. Remove them.")
    if near is None or far is None or not near < far:
        raise ConfigError(f"--near {near} --far {far}: expected 0 < near < far. Give both.")


def convert_published(
    places: Sequence[Path], out: Path, config: PublishedConfig, on_progress: Callable[[int], None] = lambda count: None
) -> WriteSummary:
    """Read every source of a format and write them as one set; see `write_published`, `write_videos` and `write_multi_view`.

    Raises:
        ConfigError: options that do not apply to the format, such as videos.
    """
    _refuse_bounds(config)
    if config.scenes is not None and (config.source != "clevr3d" or config.scenes[0] >= config.scenes[1]):
        why = (
            "applies to --as clevr3d. Remove it."
            if config.source != "clevr3d"
            else "expected A:B, as in 0:70000; B is exclusive"
        )
        raise ConfigError(f"--scenes {config.scenes[0]}:{config.scenes[1]}: {why}")
    if config.videos:
        readers = {**VIDEOS, **REAL_VIDEOS}
        if config.source not in readers:
            raise ConfigError(
                f"--videos: applies to --as {' or '.join(readers)}, but {config.source} has no videos. Remove it."
            )
        if config.crop != "none" or config.max_objects is not None:
            raise ConfigError("--videos: --crop and --max-objects do not apply to videos. Remove them.")
        return write_videos(
            out, (video for place in places for video in readers[config.source](place)), config, on_progress
        )
    if config.source in MULTI_VIEW_READERS:
        if config.crop != "none":
            raise ConfigError("--crop: does not apply to scenes with cameras. Remove it.")
        if config.max_objects is not None and config.source != "clevr3d":
            raise ConfigError(
                f"--max-objects: does not apply to --as {config.source}, whose scenes have no object counts. Remove --max-objects."
            )
        read_viewed = MULTI_VIEW_READERS[config.source]
        if config.scenes is not None:
            read_viewed = partial(clevr3d_scenes, scenes=range(*config.scenes))
        return write_multi_view(out, (scene for place in places for scene in read_viewed(place)), config, on_progress)
    read = FORMATS[config.source].read
    assert read is not None  # all others have one
    return write_published(out, (scene for place in places for scene in read(place)), config, on_progress)
