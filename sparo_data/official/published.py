"""What every reader of a published set gives: scenes; how they are cut; and the shards and the scored set that they become."""

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
from sparo_train.data.read.decoding import PUBLISHED, TRAINING, decode

from ..writer import Fields, encode_image, write_manifest, write_shards, write_wds_layout

# As in training, but not turned: masks lie on the pixels as they are stored.
PICTURES = TRAINING._replace(upright=False)

IGNORE = 255  # of label maps: pixels that no score counts
Crop = Literal["none", "clevr", "center192"]
_BOXES: dict[
    str, tuple[tuple[int, int], tuple[int, int, int, int]]
] = {  # of images of this height and width: top, bottom, left, right
    "clevr": ((240, 320), (29, 221, 64, 256)),  # IODINE's, and since then everybody's
    "center192": ((240, 320), (24, 216, 64, 256)),  # CLEVRTex's and Wu et al.'s
}


class PublishedScene(NamedTuple):
    """image (H, W, 3) uint8.  label: (H, W) uint8, an object's number, 0 for none, 255 for pixels that are not scored; None: unknown.
    metadata: for the sample's `.json`.  semantic: (H, W) uint8, a class per pixel, where there are classes."""

    key: str
    image: np.ndarray
    label: np.ndarray | None
    metadata: dict[str, Any]
    semantic: np.ndarray | None = None


class PublishedConfig(Frozen):
    """How a published set becomes shards."""

    source: str = field(..., "Name of the published format.")
    files: tuple[str, ...] = field((), "Names of the files that were read.")
    test: int = field(
        0,
        "Number of first scenes that are scored instead of trained on, rounded up to whole videos or to all parts of a scene.",
        ge=0,
    )
    limit: int | None = field(None, "Maximum number of scenes from all sources.", gt=0)
    scenes: tuple[NonNegativeInt, NonNegativeInt] | None = field(
        None, "For clevr3d: range of scene numbers, first and last + 1."
    )
    max_objects: int | None = field(
        None,
        "Skip scenes with more objects (CLEVR6: 6). Counted by masks, or by the list of objects if there are none.",
        ge=0,
    )
    crop: Crop = field(
        "none", "Crop of images of 240 x 320 pixels. clevr: rows 29:221, columns 64:256; center192: rows 24:216."
    )
    size: int | None = field(
        None,
        "Pixels per side. Images that are not square are resized without keeping their aspect ratio.",
        ge=8,
        le=4096,
    )
    per_shard: int = field(1000, "Scenes per shard.", gt=0)
    near: float | None = field(
        None,
        "Nearest and farthest distance that cameras see, in world units, for nerf and clevr3d, whose files mostly lack it.",
        ge=0,
    )
    far: float | None = field(None, "See near.", gt=0)
    videos: bool = field(False, "Write one sample per video with all planes. false: one sample per frame.")


class WriteSummary(NamedTuple):
    """Samples written. left_out: what of the annotations was left out, by reason."""

    train: int
    test: int
    without_objects: int
    left_out: Mapping[str, int] = {}


LEFT_OUT = "left_out"  # among a scene's facts while it is converted: counts of what was left out of it


def write_published(
    out: Path,
    scenes: Iterable[PublishedScene],
    config: PublishedConfig,
    on_progress: Callable[[int], None] = lambda count: None,
) -> WriteSummary:
    """ROOT/masks in the layout of evaluation sets, of the first `test` scenes, and ROOT/train/*.tar of the others.

    Raises:
        DataError: `out` holds something else already, or there is no scene.
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
            yield scene.key, fields_of(scene)

    # One stream for both parts: what is scored is its beginning, and nothing is read twice.
    stream, splitter = _with_unique_keys(samples()), _TestSplitter()
    with output_transaction(out, config):
        if config.test:
            write_wds_layout(out / "masks", splitter.test_samples(stream, config.test))
        tested = counts["all"] - len(splitter.remainder)
        write_shards(out / "train", chain(splitter.remainder, stream), config.per_shard)
        if not counts["all"]:
            raise DataError(f"{', '.join(config.files)}: not one scene in it")
        if any(number != category for number, category in categories.items()):  # masks have numbers of their own
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
    """The first `test` samples to ROOT/SCORED in the layout of evaluation sets, the others to ROOT/train/*.tar.

    Args:
        counts: `all` and `empty`, which the samples count as they are drawn.  what: one of them, in words.

    Raises:
        DataError: there is no sample, or `out` holds something else already.
    """
    stream, splitter = _with_unique_keys(samples), _TestSplitter()
    with output_transaction(out, config):
        if config.test:
            write_wds_layout(out / test_name, splitter.test_samples(stream, config.test))
        tested = counts["all"] - len(splitter.remainder)
        write_shards(out / "train", chain(splitter.remainder, stream), config.per_shard)
        if not counts["all"]:
            raise DataError(f"{', '.join(config.files)}: not one {what} in it")
    return WriteSummary(counts["all"] - tested, tested, counts["empty"])


def _with_unique_keys(samples: Iterator[tuple[str, Fields]]) -> Iterator[tuple[str, Fields]]:
    """Keys that came before get a number behind them: names that differ may be one key, and two samples of one key would be read as one."""
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
    """Write down how the set is made. What was written is taken away where it ends with an error: half of a set would be scored as one.

    Raises:
        DataError: `out` holds something else already, or shards.
    """
    if any(out.glob("*/*.tar")) or any(out.glob("*/*/*.tar")):
        raise DataError(f"{out}: holds shards already, which would mix with the new ones; name an empty folder")
    mark = out / "converted.json"
    if mark.is_file():  # without shards: of a conversion that was killed, or somebody's own
        try:
            PublishedConfig.model_validate(read_json(mark, dict, DataError))
        except ValueError:
            raise DataError(f"{mark}: is none of ours, and would be written over; name an empty folder") from None
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
            with suppress(OSError):  # somebody's own files are in it
                folder.rmdir()
        raise


class _TestSplitter:
    """What is scored ends between two videos or scenes: nothing of one that is scored is trained on."""

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
    """How many objects a scene has: those that its masks show, or those listed where there are none. Raises `DataError` for neither."""
    if scene.label is None:
        listed = scene.metadata.get("objects")
        if not isinstance(listed, list):
            raise DataError(
                f"{scene.key}: has neither masks nor a list of objects, so nobody knows how many; leave --max-objects away"
            )
        return len(listed)
    numbers = np.unique(scene.label)
    return int(((numbers > 0) & (numbers < IGNORE)).sum())


def crop_and_resize(scene: PublishedScene, config: PublishedConfig) -> PublishedScene:
    """Crop and size of image and labels, these by their nearest pixel. Raises `DataError` where the crop is of other images."""
    planes = [scene.image, scene.label, scene.semantic]
    if odd := [p.shape for p in planes[1:] if p is not None and p.shape != scene.image.shape[:2]]:
        raise DataError(f"{scene.key}: masks of {odd[0]} on an image of {scene.image.shape[:2]}; which pixel is whose?")
    if config.crop != "none":
        (height, width), (top, bottom, left, right) = _BOXES[config.crop]
        if scene.image.shape[:2] != (height, width):
            raise DataError(
                f"{scene.key}: crop={config.crop} is of images of {width} x {height} pixels, and this has {scene.image.shape[1]} x {scene.image.shape[0]}"
            )
        planes = [None if p is None else p[top:bottom, left:right] for p in planes]
    if config.size is not None:
        # Numbers of objects have no mean.
        filters = (Image.Resampling.BICUBIC, Image.Resampling.NEAREST, Image.Resampling.NEAREST)
        side = (config.size, config.size)
        planes = [
            None if p is None else np.asarray(Image.fromarray(np.ascontiguousarray(p)).resize(side, how))
            for p, how in zip(planes, filters, strict=True)
        ]
    image, label, semantic = planes
    assert image is not None
    return scene._replace(image=image, label=label, semantic=semantic)


def fields_of(scene: PublishedScene) -> dict[str, bytes]:
    """The members of a scene's sample."""
    fields = {"png": encode_image(np.ascontiguousarray(scene.image)), "json": json.dumps(scene.metadata).encode()}
    for name, plane in (("mask.png", scene.label), ("semantic.png", scene.semantic)):
        if plane is not None:
            fields[name] = encode_image(np.ascontiguousarray(plane))
    return fields


def decode_array(data: bytes, where: object, labels: bool = False) -> np.ndarray:
    """The picture in a file: (H, W, 3), or (H, W) of labels, palettes as their numbers. Raises `DataError` naming `where`."""
    how = PUBLISHED if labels else PICTURES
    try:
        image = decode(data, how)
        if labels and image.mode not in ("P", "L", "I", "I;16", "1"):
            image = image.convert("RGB")
        return np.asarray(image)
    except BadSampleError as bad:
        raise DataError(f"{where}: is not a readable picture, got {bad.full_message()}") from None


def to_label_map(plane: np.ndarray, where: object, of_several: bool = False) -> np.ndarray:
    """Label maps of any coding to (H, W) uint8: colours are numbered, black is none.

    Args:
        of_several: of pictures in which the same objects are seen.

    Raises:
        DataError: more than 254 objects, or colours of several pictures.
    """
    if plane.ndim == 3:
        # Numbered picture by picture: a colour that one of several does not show would make an object another one in it.
        if of_several:
            raise DataError(
                f"{where}: masks of colours, whose numbers would differ between pictures of one scene; write them as numbers"
            )
        flat = plane[..., :3].astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
        values, plane = np.unique(flat, return_inverse=True)
        plane = plane.reshape(flat.shape) + (0 if values[0] == 0 else 1)
    if plane.size and (plane.min() < 0 or plane.max() >= IGNORE):
        raise DataError(f"{where}: labels from {plane.min()} to {plane.max()}; 0 to {IGNORE - 1} can be written")
    return plane.astype(np.uint8)
