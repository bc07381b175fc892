"""Image-caption sets in their published files: COCO and Flickr's Karpathy splits, and SugarCrepe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import parse_json, read_text

from .base import Layout, Pair, sha256
from .image_files import FileSet
from .task_config import SetTaskConfig

SPLITS = (
    "replace_obj",
    "replace_att",
    "replace_rel",
    "swap_obj",
    "swap_att",
    "add_obj",
    "add_att",
)  # in the paper's order
# SHA-256 of the published JSON files, first 16 digits (RAIVNLab/sugar-crepe); swap_obj lost one pair on 2023-11-18
CHECKSUMS = {
    "add_obj": "1b9d76b93139a937",
    "add_att": "012d88d729693d19",
    "replace_obj": "9d299600639947e9",
    "replace_att": "9fe55fd4c0a9ad1f",
    "replace_rel": "356bcc2fc4c6aed3",
    "swap_obj": "073cdb8e253d0536",
    "swap_att": "7a7ce04e5c4c8041",
}
OLD_SWAP_OBJ = "15624c2460f5c10e"


class KarpathySet(FileSet):
    """Images with their captions from one of three kinds of annotation files.

    Args:
        images: the folder with the images.
        annotations: a COCO captions file (`coco_test_karpathy.json`: `images`, `annotations`), Karpathy's own
            `dataset_coco.json` or `dataset_flickr30k.json` (`images` with `split` and `sentences`), or clip-benchmark's
            `flickr30k_test_karpathy.txt` (a header, then `name.jpg,caption`).
        split: of Karpathy's own file.
    """

    shares_images = True

    def __init__(self, images: str | Path, annotations: str | Path, split: str = "test"):
        path = Path(annotations)
        text = read_text(path, DataError)
        rows = _flickr(text, path) if path.suffix == ".txt" else _coco(text, path, split)
        super().__init__(Path(images), list(rows), list(rows.values()), "captions", sha256(text).encode())


class SugarCrepeSet(FileSet):
    """The splits found in a folder, over distinct images: `SPLIT.json` and `val2017/*.jpg`.

    Args:
        root: folder with the JSON files (or `data/SPLIT.json`) and COCO's `val2017`.
        splits: splits to read; default: all seven.

    `version` identifies the published data by checksum: "7,511 pairs", "7,512 pairs" (the paper's) or "not published
    data".

    Raises:
        DataError: a split or an image is missing, or a file is not such a JSON.
    """

    shares_images = True

    def __init__(self, root: str | Path, splits: Sequence[str] = SPLITS):
        folder = Path(root)
        by_image: dict[str, list[Pair]] = {}
        sums = {}
        for split in splits:
            # Next to the images, or as in the repository.
            path = next((p for p in (folder / f"{split}.json", folder / "data" / f"{split}.json") if p.is_file()), None)
            if path is None:
                raise DataError(
                    f"{folder / split}.json: missing; SugarCrepe consists of seven .json files, which must be next to the folder val2017"
                )
            sums[split] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            if not (items := parse_json(read_text(path, DataError), str(path), dict, DataError)):
                raise DataError(f"{path}: contains no pairs of captions. Fetch the file again.")
            for key, item in items.items():
                names = ("filename", "caption", "negative_caption")
                texts: list[Any] = [item.get(name) for name in names] if isinstance(item, dict) else []
                if not texts or not all(isinstance(text, str) for text in texts):
                    raise DataError(f"{path}: item {key} needs filename, caption and negative_caption")
                by_image.setdefault(texts[0], []).append(Pair(split, texts[1], texts[2], key))
        self.version = _version(sums)
        # Each image once, because encoding it for each of its pairs would take five times as long.
        names = sorted(by_image)
        super().__init__(
            folder / "val2017", names, [by_image[name] for name in names], "pairs", json.dumps(sums).encode()
        )


def _version(sums: dict[str, str]) -> str:
    if any(checksum not in (CHECKSUMS.get(split), OLD_SWAP_OBJ) for split, checksum in sums.items()):
        return "not published data"
    return "7,512 pairs" if sums.get("swap_obj") == OLD_SWAP_OBJ else "7,511 pairs"


def _coco(text: str, path: Path, split: str) -> dict[str, list[str]]:
    annotations = parse_json(text, str(path), dict, DataError)
    rows: dict[str, list[str]] = {}
    try:
        if "annotations" in annotations:
            names = {image["id"]: image["file_name"] for image in annotations["images"]}
            # In numerical order, as in clip-benchmark's reader, because R@k of ties depends on it.
            rows = {names[number]: [] for number in sorted(names)}
            for note in annotations["annotations"]:
                rows[names[note["image_id"]]].append(note["caption"].strip())
        else:
            for image in annotations["images"]:
                if image["split"] == split:
                    rows[image["filename"]] = [sentence["raw"].strip() for sentence in image["sentences"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is neither a COCO captions file nor one of Karpathy's ({error!r})") from None
    return rows


def _flickr(text: str, path: Path) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    # The first line is a header.
    for number, line in enumerate(text.splitlines()[1:], 2):
        name, separator, caption = line.strip().partition(".jpg,")
        if line.strip() and not separator:
            raise DataError(f"{path}: line {number} is not `name.jpg,caption`")
        if separator:
            rows.setdefault(f"{name}.jpg", []).append(caption)
    return rows


def _karpathy(config: SetTaskConfig, split: str) -> KarpathySet:
    annotations = getattr(config, "annotations", None)
    if annotations is None:
        raise ConfigError("layout=karpathy: needs the key `annotations`, which names the file with the captions")
    return KarpathySet(config.root, annotations, split)


KARPATHY = Layout(("captions",), lambda config, _kind, split: _karpathy(config, split))
SUGAR_CREPE = Layout(("pairs",), lambda config, _kind, _split: SugarCrepeSet(config.root))
