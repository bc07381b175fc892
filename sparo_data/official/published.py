"""Scenes of published sets: their common form, cropping, and writing to shards and a scored set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import NonNegativeInt

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import read_json, write_whole
from sparo_train.data.decode.decoding import PUBLISHED, TRAINING, decode, unscale_labels

from ..writer import Fields, encode_image, write_manifest, write_shards, write_wds_layout

# As in training, but without rotation, because masks are aligned with the stored pixels.
PICTURES = TRAINING._replace(upright=False)

IGNORE = 255  # label of pixels that no score counts
Crop = Literal["none", "clevr", "center192"]
_BOXES: dict[
    str, tuple[tuple[int, int], tuple[int, int, int, int]]
] = {  # crops for images of this height and width: top, bottom, left, right
    "clevr": ((240, 320), (29, 221, 64, 256)),  # IODINE's, which later work adopted
    "center192": ((240, 320), (24, 216, 64, 256)),  # CLEVRTex's and that of Wu et al.
}


class PublishedScene(NamedTuple):
    """A scene of a published set.

    Attributes:
        image: (H, W, 3) uint8.
        label: (H, W) uint8, object number, 0 for none, 255 for pixels that are not scored; None: unknown.
        metadata: content of the sample's `.json`.
        semantic: (H, W) uint8, class per pixel, if there are classes.
    """

    key: str
    image: np.ndarray
    label: np.ndarray | None
    metadata: dict[str, Any]
    semantic: np.ndarray | None = None


class PublishedConfig(Frozen):
    """Options of the conversion of a published set."""

    source: str = field(..., "Name of the published format, such as clevr3d.")
    files: tuple[str, ...] = field(
        (), "Names of the source files that were read, as `sparo data convert` records them."
    )
    test: int = field(
        0,
        "Number of samples (scenes, images or frames; with videos=true: videos) that are held out for evaluation, "
        "counted from the first one and rounded up so that no video or scene is split.",
        ge=0,
    )
    limit: int | None = field(None, "Maximum number of scenes from all sources.", gt=0)
    scenes: tuple[NonNegativeInt, NonNegativeInt] | None = field(
        None, "For clevr3d: scene numbers to convert, as [first, last + 1]."
    )
    max_objects: int | None = field(
        None,
        "Skip scenes with more than this many objects (6 for CLEVR6). Objects are counted in the masks, or "
        "in the list of objects if the set has no masks.",
        ge=0,
    )
    crop: Crop = field(
        "none",
        "Crop images of 320 x 240 pixels (width x height) to columns 64:256 and to rows 29:221 (clevr) or 24:216 (center192).",
    )
    size: int | None = field(
        None,
        "Width and height, in pixels. Images that are not square are resized without keeping their aspect ratio.",
        ge=8,
        le=4096,
    )
    per_shard: int = field(1000, "Scenes per shard.", gt=0)
    near: float | None = field(
        None,
        "Distance from a camera to the nearest point that it sees, in world units. For nerf and clevr3d, if their "
        "files do not contain this distance.",
        ge=0,
    )
    far: float | None = field(
        None, "Distance from a camera to the farthest point that it sees, in world units. See near.", gt=0
    )
    videos: bool = field(
        False,
        "Write one sample per video, with all annotations that its files have, such as masks, depth and flow. "
        "false: one sample per frame.",
    )


class WriteSummary(NamedTuple):
    """Samples written, and annotations that were skipped, by reason (`left_out`)."""

    train: int
    test: int
    without_objects: int
    left_out: Mapping[str, int] = {}


LEFT_OUT = "left_out"  # key of a scene's metadata during conversion: counts of skipped annotations


def write_published(
    out: Path,
    scenes: Iterable[PublishedScene],
    config: PublishedConfig,
    on_progress: Callable[[int], None] = lambda count: None,
) -> WriteSummary:
    """Write the first `test` scenes to ROOT/masks, in the layout of evaluation sets, and the others to ROOT/train/*.tar.

    Raises:
        DataError: `out` contains something else already, or no scene was found.
    """
    counts = {"all": 0, "empty": 0}
    left_out: Counter[str] = Counter()
    categories: dict[int, Any] = {}

    def samples() -> Iterator[tuple[str, Fields]]:
        for scene in islice(
            (s for s in scenes if config.max_objects is None or count_objects(s) <= config.max_objects), config.limit
        ):
            left_out.update(scene.metadata.pop(LEFT_OUT, {}))
            objects = scene.metadata.get("objects")
            categories.update(
                {one["class"]: one["category"] for one in objects if isinstance(one, dict) and "class" in one}
                if isinstance(objects, list)
                else {}
            )
            scene = crop_and_resize(scene, config)
            counts["all"] += 1
            counts["empty"] += scene.label is not None and not ((scene.label > 0) & (scene.label < IGNORE)).any()
            on_progress(counts["all"])
            yield scene.key, build_fields(scene)

    # One stream for both parts: the scored part is its beginning, and nothing is read twice.
    stream, splitter = _with_unique_keys(samples()), _TestSplitter()
    with output_transaction(out, config):
        if config.test:
            write_wds_layout(out / "masks", splitter.test_samples(stream, config.test))
        tested = counts["all"] - len(splitter.remainder)
        write_shards(out / "train", chain(splitter.remainder, stream), config.per_shard)
        if not counts["all"]:
            raise DataError(f"{', '.join(config.files)}: contains no scene")
        if any(number != category for number, category in categories.items()):  # masks have their own numbers
            write_whole(out / "categories.json", json.dumps(dict(sorted(categories.items())), indent=1))
    return WriteSummary(counts["all"] - tested, tested, counts["empty"], left_out)


def write_test_and_train(
    out: Path,
    test_name: str,
    samples: Iterator[tuple[str, Fields]],
    config: PublishedConfig,
    counts: Mapping[str, int],
    what: str,
) -> WriteSummary:
    """Write the first `test` samples to ROOT/SCORED, in the layout of evaluation sets, and the others to ROOT/train/*.tar.

    Args:
        out, test_name: folders.
        samples: the samples.
        config: options.
        counts: `all` and `empty`, which iterating the samples updates.
        what: name of a sample for errors.

    Raises:
        DataError: no sample was found, or `out` contains something else already.
    """
    stream, splitter = _with_unique_keys(samples), _TestSplitter()
    with output_transaction(out, config):
        if config.test:
            write_wds_layout(out / test_name, splitter.test_samples(stream, config.test))
        tested = counts["all"] - len(splitter.remainder)
        write_shards(out / "train", chain(splitter.remainder, stream), config.per_shard)
        if not counts["all"]:
            raise DataError(f"{', '.join(config.files)}: contains no {what}")
    return WriteSummary(counts["all"] - tested, tested, counts["empty"])


def _with_unique_keys(samples: Iterator[tuple[str, Fields]]) -> Iterator[tuple[str, Fields]]:
    """Append a number to repeated keys: different names may give one key, and two samples with one key would be read as one."""
    used_keys: set[str] = set()
    for key, fields in samples:
        name, number = key, 1
        while name in used_keys:
            number += 1
            name = f"{key}-{number}"
        used_keys.add(name)
        yield name, fields


@contextmanager
def output_transaction(out: Path, config: PublishedConfig) -> Iterator[None]:
    """Record how the set is made, and remove the files if an error occurs, because half a set would be scored as a whole.

    Raises:
        DataError: `out` contains something else already, or shards.
    """
    if any(out.glob("*/*.tar")) or any(out.glob("*/*/*.tar")):
        raise DataError(f"{out}: contains shards already, which would mix with the new ones. Name an empty folder.")
    mark = out / "converted.json"
    if mark.is_file():  # without shards: from a conversion that was killed, or the user's own
        try:
            PublishedConfig.model_validate(read_json(mark, dict, DataError))
        except ValueError:
            raise DataError(
                f"{mark}: was not written by sparo and would be overwritten. Name an empty folder."
            ) from None
        mark.unlink()
    write_manifest(out, config, "converted.json")
    try:
        yield
    except BaseException:
        for path in [
            out / "converted.json",
            *out.glob("*/*.tar"),
            *out.glob("*/*/*.tar"),
            *out.glob("*/*/nshards.txt"),
        ]:
            path.unlink(missing_ok=True)
        for folder in [*out.glob("*/*/"), *out.glob("*/"), out]:
            with suppress(OSError):  # it contains the user's own files
                folder.rmdir()
        raise


class _TestSplitter:
    """Splitter between two videos or scenes, so that no part of a scored one is trained on."""

    def __init__(self) -> None:
        self.remainder: list[tuple[str, Fields]] = []

    def test_samples(self, stream: Iterator[tuple[str, Fields]], count: int) -> Iterator[tuple[str, Fields]]:
        last = None
        for number, (key, fields) in enumerate(stream):
            facts = json.loads(fields["json"])
            group = facts.get("video", facts.get("scene"))
            if number >= count and (group is None or group != last):
                self.remainder.append((key, fields))
                return
            last = group
            yield key, fields


def count_objects(scene: PublishedScene) -> int:
    """Return the number of objects in a scene: those in its masks, or those listed if there are none. Raises `DataError` without either."""
    if scene.label is None:
        listed = scene.metadata.get("objects")
        if not isinstance(listed, list):
            raise DataError(
                f"{scene.key}: has neither masks nor a list of objects, so the number of objects is unknown. Remove --max-objects."
            )
        return len(listed)
    numbers = np.unique(scene.label)
    return int(((numbers > 0) & (numbers < IGNORE)).sum())


def crop_and_resize(scene: PublishedScene, config: PublishedConfig) -> PublishedScene:
    """Crop and resize an image, and its labels by nearest neighbours. Raises `DataError` if the crop is for images of another size."""
    planes = [scene.image, scene.label, scene.semantic]
    if odd := [p.shape for p in planes[1:] if p is not None and p.shape != scene.image.shape[:2]]:
        raise DataError(f"{scene.key}: masks have the shape {odd[0]}, but the image has {scene.image.shape[:2]}")
    if config.crop != "none":
        (height, width), (top, bottom, left, right) = _BOXES[config.crop]
        if scene.image.shape[:2] != (height, width):
            raise DataError(
                f"{scene.key}: crop={config.crop} applies to images of {width} x {height} pixels, got {scene.image.shape[1]} x {scene.image.shape[0]}"
            )
        planes = [None if p is None else p[top:bottom, left:right] for p in planes]
    if config.size is not None:
        # Object numbers cannot be averaged.
        filters = (Image.Resampling.BICUBIC, Image.Resampling.NEAREST, Image.Resampling.NEAREST)
        side = (config.size, config.size)
        planes = [
            None if p is None else np.asarray(Image.fromarray(np.ascontiguousarray(p)).resize(side, how))
            for p, how in zip(planes, filters, strict=True)
        ]
    image, label, semantic = planes
    assert image is not None
    return scene._replace(image=image, label=label, semantic=semantic)


def build_fields(scene: PublishedScene) -> dict[str, bytes]:
    """Return the members of a scene's sample."""
    fields = {"png": encode_image(np.ascontiguousarray(scene.image)), "json": json.dumps(scene.metadata).encode()}
    for name, plane in (("mask.png", scene.label), ("semantic.png", scene.semantic)):
        if plane is not None:
            fields[name] = encode_image(np.ascontiguousarray(plane))
    return fields


def decode_array(data: bytes, where: object, labels: bool = False) -> np.ndarray:
    """Decode an image file to (H, W, 3), or to (H, W) labels, with palette indices as numbers. Raises `DataError` naming `where`."""
    how = PUBLISHED if labels else PICTURES
    try:
        image = decode(data, how)
        if labels and image.mode not in ("P", "L", "I", "I;16", "1"):
            image = image.convert("RGB")
        return unscale_labels(np.asarray(image), data) if labels and image.mode == "L" else np.asarray(image)
    except BadSampleError as bad:
        raise DataError(f"{where}: is not a readable picture, got {bad.full_message()}") from None


def to_label_map(plane: np.ndarray, where: object, of_several: bool = False) -> np.ndarray:
    """Convert label maps of any coding to (H, W) uint8: colours are numbered, black is none.

    Args:
        plane: the decoded image.
        where: name for errors.
        of_several: the same objects are seen in several images.

    Raises:
        DataError: more than 254 objects, or colours in several images.
    """
    if plane.ndim == 3:
        # Colours are numbered per image, so an object that is missing in one of several images would shift the numbers.
        if of_several:
            raise DataError(
                f"{where}: the masks are stored as colours, so an object would get different numbers in "
                f"different images of a scene. Store the masks as object numbers."
            )
        flat = plane[..., :3].astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
        values, plane = np.unique(flat, return_inverse=True)
        plane = plane.reshape(flat.shape) + (0 if values[0] == 0 else 1)
    if plane.size and (plane.min() < 0 or plane.max() >= IGNORE):
        raise DataError(f"{where}: expected labels from 0 to {IGNORE - 1}, got {plane.min()} to {plane.max()}")
    return plane.astype(np.uint8)
