"""The published formats by name, and from their files to shards."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sparo_train.core.errors import ConfigError, DataError, did_you_mean

from .clevr3d import clevr3d_scenes
from .clips import movi, npy_shards
from .folders import clevr, clevrtex, coco
from .lmdb_file import lmdb_scenes
from .multi_object import SETS, multi_object
from .published import PublishedConfig, PublishedScene, WriteSummary, write_published
from .sunds import sunds_scenes
from .videos import VIDEOS, write_videos
from .viewed import PublishedViews, nerf_scenes, write_multi_view

MULTI_VIEW_READERS: dict[str, Callable[[Path], Iterator[PublishedViews]]] = {
    "nerf": nerf_scenes, "clevr3d": clevr3d_scenes, "sunds": sunds_scenes
}  # fmt: skip


class Format(NamedTuple):
    """read: one source to its scenes; None: it has only scenes of several cameras (viewed.py).  what: that source, in words.

    suffix: of such files in a folder; empty: the source is a folder or one file.
    """

    read: Callable[[Path], Iterator[PublishedScene]] | None
    what: str
    suffix: str = ""


FORMATS: dict[str, Format] = {
    **{
        name: Format(partial(multi_object, name=name), "*.tfrecords of multi_object_datasets", "tfrecord")
        for name in SETS
    },
    "movi": Format(movi, "TFDS' *.tfrecord-* of MOVi-A to F, a still per frame, or with --videos whole", "tfrecord"),
    "npy": Format(
        npy_shards, "tars of key.video.npy and key.segmentations.npy, a still per frame, or with --videos whole", ".tar"
    ),
    "clevr": Format(clevr, "CLEVR_v1.0/scenes/CLEVR_SPLIT_scenes.json"),
    "clevrtex": Format(clevrtex, "CLEVRTex' folder of pictures, *_flat.png and *.json"),
    "coco": Format(coco, "COCO's instances_SPLIT.json, with SPLIT/*.jpg beside its folder"),
    "nerf": Format(None, "folders of transforms.json with pictures (Blender's, NeRF's, nerfstudio's), each a scene"),
    "clevr3d": Format(None, "ObSuRF's folder of metadata.npz, images and masks"),
    "sunds": Format(None, "TFDS' *.tfrecord-* of MultiShapeNet (MSN-Hard, MSN-Easy), a scene per record", "tfrecord"),
    "lmdb": Format(lmdb_scenes, "*.lmdb of pictures of the Genera1Z family", ".lmdb"),
}


def find_source_files(place: Path, name: str) -> list[Path]:
    """The files of a format at `place`, in the order of their names.

    Raises:
        ConfigError: no such format.
        DataError: nothing of it there.
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
    if place.is_dir() and name in ("clevr", "coco"):
        raise DataError(f"{place}: is a folder; --as {name} reads {kind.what}")
    if not kind.suffix or place.is_file() or (place / "data.mdb").is_file():
        return [place]
    files = sorted(p for p in place.iterdir() if p.is_file() and kind.suffix in p.name)
    if not files:
        raise DataError(f"{place}: none of {kind.what} in it")
    parts = sorted({p.name.partition(kind.suffix)[0].rstrip(".") for p in files}) if kind.suffix == "tfrecord" else []
    if len(parts) > 1:
        raise DataError(
            f"{place}: holds several splits ({', '.join(parts)}), which would mix; give {place / parts[0]} for one of them"
        )
    return files


def _refuse_bounds(config: PublishedConfig) -> None:
    """Raise `ConfigError` for a near and a far that are not two, not in order, or told of scenes that say their own or have no cameras."""
    near, far = config.near, config.far
    if near is None and far is None:
        return
    if config.source not in ("nerf", "clevr3d"):
        raise ConfigError(f"--near, --far: are of --as nerf and clevr3d, not of {config.source}; leave them away")
    if near is None or far is None or not near < far:
        raise ConfigError(f"--near {near} --far {far}: give both, the smaller one first")


def convert_published(
    places: Sequence[Path], out: Path, config: PublishedConfig, on_progress: Callable[[int], None] = lambda count: None
) -> WriteSummary:
    """Read every source of a format and write them as one set, see `write_published`, `write_videos` and `write_multi_view`.

    Raises:
        ConfigError: videos of a format that has none, or what is of stills.
    """
    _refuse_bounds(config)
    if config.scenes is not None and (config.source != "clevr3d" or config.scenes[0] >= config.scenes[1]):
        why = (
            "is of --as clevr3d"
            if config.source != "clevr3d"
            else "write A:B, as in 0:70000; B is the first that is left out"
        )
        raise ConfigError(f"--scenes {config.scenes[0]}:{config.scenes[1]}: {why}")
    if config.videos:
        if config.source not in VIDEOS:
            raise ConfigError(
                f"--videos: is of --as {' or '.join(VIDEOS)}, and {config.source} has none; leave it away"
            )
        if config.crop != "none" or config.max_objects is not None:
            raise ConfigError(
                "--videos: videos are neither cropped nor chosen by their objects; leave --crop and --max-objects away"
            )
        return write_videos(
            out, (video for place in places for video in VIDEOS[config.source](place)), config, on_progress
        )
    if config.source in MULTI_VIEW_READERS:
        if config.crop != "none":
            raise ConfigError("--crop: cameras see whole pictures; leave it away")
        if config.max_objects is not None and config.source != "clevr3d":
            raise ConfigError(
                f"--max-objects: scenes of --as {config.source} do not say how many objects they have; leave it away"
            )
        read_viewed = MULTI_VIEW_READERS[config.source]
        if config.scenes is not None:
            read_viewed = partial(clevr3d_scenes, scenes=range(*config.scenes))
        return write_multi_view(out, (scene for place in places for scene in read_viewed(place)), config, on_progress)
    read = FORMATS[config.source].read
    assert read is not None  # all others have one
    return write_published(out, (scene for place in places for scene in read(place)), config, on_progress)
