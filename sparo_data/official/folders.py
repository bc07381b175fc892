"""Sets of images with annotation files: CLEVR (scenes as JSON), CLEVRTex, COCO instances."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import is_safe_relative_path, read_bytes, read_json

from .clips import sanitize_key
from .published import IGNORE, LEFT_OUT, PublishedScene, decode_array, to_label_map
from .run_lengths import decode_run_lengths

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 31  # limit in bytes for annotation files; COCO's has 0.45e9


def clevr(root: Path) -> Iterator[PublishedScene]:
    """Read CLEVR_v1.0: `images/SPLIT/*.png` with `scenes/CLEVR_SPLIT_scenes.json`, or images next to or below the scenes file.

    Args:
        root: the JSON file of scenes.

    Raises:
        DataError: no such file, or a scene whose image is missing.
    """
    listed = read_json(root, dict, DataError, _MAX_BYTES).get("scenes")
    if not isinstance(listed, list):
        raise DataError(f"{root}: has no list `scenes`. Give CLEVR's scenes/CLEVR_SPLIT_scenes.json.")
    folder: Path | None = None  # from the first scene, because sets do not mix folders
    for number, scene in enumerate(listed):
        name, split = (scene.get(k, "") if isinstance(scene, dict) else None for k in ("image_filename", "split"))
        if not name or not all(
            isinstance(word, str) and word != ".." and Path(word).name == word for word in (name, split)
        ):
            raise DataError(
                f"{root}: scene {number} must have an `image_filename`, and both `image_filename` and `split` must be plain names"
            )
        folder = folder or _find_pictures(root, str(split), str(name))
        path = folder / str(name)
        image = decode_array(read_bytes(path, DataError), path)
        objects = scene.get("objects", [])  # the test split has none
        if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
            raise DataError(f"{root}: scene {number}: `objects` is not a list of JSON objects")
        yield PublishedScene(Path(str(name)).stem, image, None, {"objects": objects})


def _find_pictures(root: Path, split: str, name: str) -> Path:
    """Return the folder of a scenes file's images: as published, or next to or below the file. Raises `DataError`."""
    above, here = root.parent.parent, root.parent
    places = [above / "images" / split, above / "images", here / "images" / split, here / "images", here / split, here]
    folder = next((place for place in dict.fromkeys(places) if (place / name).is_file()), None)
    if folder is None:
        listed = ", ".join(str(place) for place in dict.fromkeys(places))
        raise DataError(
            f"{root}: image {name} is in none of these folders: {listed}. Put the folder images/ next to {root.name}."
        )
    return folder


def clevrtex(root: Path) -> Iterator[PublishedScene]:
    """Read CLEVRTex: NAME.png with NAME_flat.png (object number per pixel) and NAME.json, in folders below `root`, by name.

    Raises:
        DataError: there are none, or an image has no mask.
    """
    # By name instead of folder, because folders are numbered without zero padding, names with.
    paths = sorted(root.rglob("*.json"), key=lambda path: (path.stem, path))
    if not paths:
        raise DataError(f"{root}: no CLEVRTEX_*.json in this folder")
    for path in paths:
        image, mask = path.with_suffix(".png"), path.with_name(f"{path.stem}_flat.png")
        label = to_label_map(decode_array(read_bytes(mask, DataError), mask, labels=True), mask)
        yield PublishedScene(
            path.stem, decode_array(read_bytes(image, DataError), image), label, read_json(path, dict, DataError)
        )


def coco(annotations: Path, images: Path | None = None) -> Iterator[PublishedScene]:
    """Read COCO instances: pixels of several objects and of crowds are not scored; a class per pixel is also stored.

    Args:
        annotations: instances_SPLIT.json.
        images: the folder of images (default: SPLIT next to the annotations' folder).

    Raises:
        DataError: no such file, a missing image, or an invalid polygon.
        ConfigError: pycocotools is not installed.
    """
    try:
        from pycocotools import mask as coder  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("COCO's masks need pycocotools. pip install -e '.[convert]' in sparo's checkout.") from None
    tree = read_json(annotations, dict, DataError, max_bytes=_MAX_BYTES)
    folder = images or annotations.parent.parent / annotations.stem.removeprefix("instances_")
    of_image: dict[Any, list[dict[str, Any]]] = {}
    try:
        if not isinstance(tree["annotations"], list):
            raise TypeError("annotations are not a list")
        for one in tree["annotations"]:
            of_image.setdefault(_image_id(one["image_id"]), []).append(one)
        ids = Counter(_image_id(row["id"]) for row in tree["images"])
        listed = [
            (PurePosixPath(row["file_name"]), of_image.get(_image_id(row["id"]), []), row["height"], row["width"])
            for row in tree["images"]
        ]
    except (KeyError, TypeError) as error:
        raise DataError(f"{annotations}: is not a COCO instances file ({error})") from None
    if ids and (repeated := ids.most_common(1)[0])[1] > 1:
        raise DataError(
            f"{annotations}: {repeated[1]} images have the id {repeated[0]}, so it is unclear which objects belong to which image. Give the images "
            "of merged files new, unique ids."
        )
    if orphans := of_image.keys() - ids.keys():
        logger.warning(
            f"{annotations}: {sum(len(of_image[one]) for one in orphans)} objects belong to {len(orphans)} image ids that the file does not list. "
            "They are not converted."
        )
    names = Counter(place.name for place, *_ in listed)
    numbers = _class_numbers(one for objects in of_image.values() for one in objects)
    for place, found, height, width in listed:
        # Some file names contain folders, so one image must not stand for two with the same name.
        inside = is_safe_relative_path(str(place)) and (folder / place).is_file()
        if not inside and names[place.name] > 1:
            raise DataError(
                f"{folder / place}: no such image. It cannot be found by its name alone, because {names[place.name]} "
                f"images are called {place.name}. Keep the images in the folders that the annotations name."
            )
        path, name = folder / (place if inside else place.name), place.name
        image = decode_array(read_bytes(path, DataError), path)
        if image.shape[:2] != (height, width):
            raise DataError(
                f"{path}: has {image.shape[1]} x {image.shape[0]} pixels, but {annotations.name} says {width} x {height}"
            )
        outlined, left_out = _with_outlines(found)
        label, semantic = _rasterize_objects(coder, outlined, (height, width), f"{annotations.name}: {name}", numbers)
        boxes = [
            {
                "id": i + 1,
                "category": one["category_id"],
                "class": numbers[int(one["category_id"])],
                "area": one.get("area"),
            }
            for i, one in enumerate(outlined)
        ]
        facts = {"objects": boxes, **({"file": name} if sanitize_key(path.stem) != path.stem else {})}
        yield PublishedScene(sanitize_key(path.stem), image, label, {**facts, LEFT_OUT: dict(left_out)}, semantic)


def _class_numbers(objects: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Return the number of each category in the masks: its id if all ids are 1 to 254, as in COCO, otherwise its rank from 1 on.

    Raises:
        DataError: more than 254 categories, or one that is not a number.
    """
    ids = sorted({number for one in objects if (number := _category(one)) is not None})
    if all(0 < number < IGNORE for number in ids):
        return {number: number for number in ids}
    if len(ids) >= IGNORE:
        raise DataError(
            f"annotations: masks can store at most {IGNORE - 1} categories, got {len(ids)}. Convert a file with fewer categories."
        )
    return {number: rank for rank, number in enumerate(ids, 1)}


def _with_outlines(objects: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the objects that have a category and an outline, without degenerate polygons, and counts of those skipped."""
    outlined: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for one in objects:
        shape = one.get("segmentation")
        if _category(one) is None:
            left_out["objects without a category"] += 1
            continue
        if isinstance(shape, list):
            if shape and all(
                isinstance(x, int | float) for x in shape
            ):  # a single polygon instead of a list of polygons
                shape = [shape]
            whole = [
                points for points in shape if points is not None and not (isinstance(points, list) and len(points) < 6)
            ]
            left_out["polygons of fewer than three points"] += len(shape) - len(whole)
            shape = whole
        if shape in (None, [], {}):
            left_out["objects without an outline"] += 1
            continue
        outlined.append({**one, "segmentation": shape})
    return outlined, +left_out


def _category(one: Mapping[str, Any]) -> int | None:
    """Return the number of an object's category, or None without one. Raises `DataError` for anything else."""
    if one.get("category_id") is None:
        return None
    try:
        return int(one["category_id"])
    except (TypeError, ValueError) as error:
        raise DataError(f"annotations: an object has a category_id that is not a number ({error})") from None


def _image_id(value: Any) -> int:
    """Return an id. Raises `TypeError` for other values, whose annotations could not be found."""
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not the number of an image")
    return value


def _outline(coder: Any, shape: Any, side: tuple[int, int]) -> np.ndarray:
    """Return the pixels of an object, (height, width) bool, from polygons or run lengths. Raises `ValueError` or an error of the decoder."""
    if isinstance(shape, list):
        # Check before, because pycocotools' C code crashes the process for invalid numbers.
        limit = 2 * max(side)
        for points in shape:
            if len(points) < 6 or len(points) % 2:
                raise ValueError("a polygon needs three or more points with x and y")
            if not all(isinstance(x, int | float) and -limit <= x <= limit for x in points):
                raise ValueError("a polygon is outside the image")
        return coder.decode(coder.merge(coder.frPyObjects(shape, *side))).astype(bool)
    return decode_run_lengths(shape, side)


def _rasterize_objects(
    coder: Any, objects: list[dict[str, Any]], side: tuple[int, int], where: str, numbers: Mapping[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    label, semantic = np.zeros(side, np.uint8), np.zeros(side, np.uint8)
    coverage = np.zeros(side, np.int32)
    if len(objects) >= IGNORE:
        raise DataError(f"{where}: expected at most 254 objects in an image, got {len(objects)}")
    for i, one in enumerate(objects):
        try:
            object_mask = _outline(coder, one["segmentation"], side)
            category = numbers[int(one["category_id"])]
        except Exception as error:  # pycocotools' C code may raise anything
            raise DataError(f"{where}: object {i} has no usable segmentation ({str(error)[:200]})") from None
        coverage += object_mask
        # Later objects overwrite earlier ones, until shared pixels are removed below.
        label[object_mask], semantic[object_mask] = i + 1, category
        if one.get("iscrowd"):
            coverage[object_mask] = 2
    label[coverage > 1] = semantic[coverage > 1] = IGNORE
    return label, semantic
