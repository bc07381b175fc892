"""Sets whose images are single files: a base class, and the ImageNet family."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image

from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.core.files import is_safe_relative_path, read_bytes, read_json
from sparo_train.data.decode.decoding import refuse_unclear_rotation
from sparo_train.data.sources.folder import class_order, open_folder, refuse_splits

from .base import EvalSet, Fact, FactKind, Layout, evenly, sha256, stat_files
from .pictures import label_image, open_image
from .task_config import SetTaskConfig

_MAX_COMPARED = 4096  # training files that are read to find copies among the test files


class FileSet(EvalSet):
    """Image files with annotations.

    Attributes:
        shares_images: other sets are likely to contain the same files, so their encodings are looked up by content.

    Args:
        root: base folder of the keys.
        names: the files' paths below `root`, which are also their keys.
        facts: annotation of each.
        kind: kind of the annotations.
        extra: further content of the set's identity, such as an annotation file.

    Raises:
        DataError: no names, or one that is not a file below `root`.
    """

    shares_images = False

    def __init__(self, root: Path, names: Sequence[str], facts: Sequence[Fact], kind: FactKind, extra: bytes = b""):
        self.root, self.kind, self._names, self._facts, self._extra = root, kind, list(names), list(facts), extra
        if not self._names:
            raise DataError(f"{root}: contains no images")
        for name in self._names:
            # Names come from foreign annotations: one with .. could read any file.
            if not is_safe_relative_path(name):
                raise DataError(
                    f"{root}: expected names of images below this folder, got {name!r}. Write paths relative to it."
                )

    def __len__(self) -> int:
        return len(self._names)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        return self._names[number], open_image(self.root / self._names[number], not self.published), self._facts[number]

    def describe(self, number: int) -> tuple[str, Fact]:
        """Return key and annotation without reading the image."""
        return self._names[number], self._facts[number]

    def digest(self, number: int) -> bytes:
        """Return 16 bytes that are equal for equal images, if `shares_images`."""
        name = self._names[number]
        if name not in self._digests:
            self._digests[name] = xxhash.xxh3_128_digest(read_bytes(self.root / name, DataError))
        return self._digests[name]

    def copies_in(self, train: FileSet, count: int = 256) -> tuple[int, int]:
        """Return how many of at most `count` images, evenly spaced, have the content of a file of `train`, and how many were compared."""
        sizes, train_sizes = (np.frombuffer(one._stat[0], np.int64) for one in (self, train))
        numbers = evenly(len(self), count)
        # Only files of equal size are read, and not all of them if every file has the same size, as in uncompressed formats.
        same_size = np.isin(train_sizes, sizes[numbers]).nonzero()[0]
        contents = {train.digest(int(same_size[i])) for i in evenly(len(same_size), _MAX_COMPARED)}
        return sum(self.digest(number) in contents for number in numbers), len(numbers)

    @cached_property
    def _digests(self) -> dict[str, bytes]:
        return {}

    def identity(self) -> str:
        # Annotations are included, because the same files with corrected labels are another set.
        return sha256(json.dumps([self._names, self._facts]), self._stat[0], self._extra)

    def stamp(self) -> str:
        return sha256(self._stat[1])

    @cached_property
    def _stat(self) -> tuple[bytes, bytes]:
        return stat_files([self.root / name for name in self._names])


class MaskedFiles(FileSet):
    """Image files with label images of the same size, whose paths below root are the facts until they are read."""

    shares_images = False

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        key, image, name = super().read(number)
        if not is_safe_relative_path(name):
            raise DataError(f"{self.root}: {name!r} is not the name of a mask in this folder. Correct the table.")
        path = self.root / name
        mask = label_image(read_bytes(path, DataError), str(path))
        if mask.shape != (image.height, image.width):
            raise DataError(
                f"{path}: has {mask.shape[1]} x {mask.shape[0]} pixels, but its image {key} has {image.width} x {image.height}. "
                "Resize one of them."
            )
        if not self.published:
            try:
                refuse_unclear_rotation(read_bytes(self.root / self._names[number], DataError))
            except BadSampleError as bad:
                raise DataError(f"{self.root / self._names[number]}: {bad}.") from None
        return key, image, mask

    def identity(self) -> str:
        return sha256(super().identity(), self._mask_stat[0])

    def stamp(self) -> str:
        return sha256(super().stamp(), self._mask_stat[1])

    @cached_property
    def _mask_stat(self) -> tuple[bytes, bytes]:
        return stat_files([self.root / name for name in self._facts])


class ImageNetSet(FileSet):
    """A folder with one folder per class, named by WordNet id (or, if `numbered`, by the class's number, as in ImageNet-V2).

    The classes are those that have a folder, in ImageNet's order, so that A and R are scored over their 200.

    Args:
        expected: required number of classes.

    Raises:
        DataError: a folder that is not a class, or another number of classes.
    """

    def __init__(self, root: str | Path, expected: int | None = None, numbered: bool = False):
        folder = Path(root)
        parts = open_folder(folder, "root", mixed=False)
        names = [name for part in parts for name in part.names()]
        # Classes of images instead of folders, because an empty class folder cannot be scored.
        present = sorted({name.partition("/")[0] for name in names})
        class_numbers = {wnid: i for i, wnid in enumerate(wordnet_ids())}
        if numbered:  # with or without zero padding
            class_numbers = {name: int(name) for name in class_order(present) if name.isdecimal() and int(name) < 1000}
        # Numbers without gaps: a set with 200 of the classes is scored over these 200.
        for name in present:
            if name not in class_numbers:
                what = "a class number from 0 to 999" if numbered else "one of ImageNet's 1,000 WordNet ids"
                raise DataError(f"{folder / name}: is not {what}. Give the folder that contains the class folders.")
        if expected is not None and len(present) != expected:
            raise DataError(f"{folder}: expected {expected} class folders, got {len(present)}. Fetch it again.")
        classes = sorted(class_numbers[name] for name in present)
        # Renumber: scores use the classes that exist, in the same order as class vectors.
        place = {imagenet: i for i, imagenet in enumerate(classes)}
        super().__init__(folder, names, [place[class_numbers[name.partition("/")[0]]] for name in names], "label")
        self._classes, self.left_out = classes, parts[0].left_out

    def classnames(self) -> list[str]:
        return self.own_classnames()

    def own_classnames(self) -> list[str]:
        from open_clip import IMAGENET_CLASSNAMES  # imports in seconds, which listing sets does not need

        return [IMAGENET_CLASSNAMES[i] for i in self._classes]

    def templates(self) -> list[str]:
        return imagenet_templates()


class FolderSet(FileSet):
    """A folder with one folder per class, in the order of `class_order`; folders name the classes (`_` is a space).

    Raises:
        DataError: no images, or some outside the class folders.
    """

    def __init__(self, root: str | Path):
        folder = Path(root)
        parts = open_folder(folder, "root", mixed=False)
        names = [name for part in parts for name in part.names()]
        for name in names:
            if "/" not in name:
                raise DataError(
                    f"{folder / name}: is outside the class folders, so its class is unknown. Move or remove it."
                )
        self._classes = class_order(name.partition("/")[0] for name in names)
        refuse_splits(folder, self._classes)
        place = {name: i for i, name in enumerate(self._classes)}
        super().__init__(folder, names, [place[name.partition("/")[0]] for name in names], "label")
        self.left_out = parts[0].left_out

    def own_classnames(self) -> list[str]:
        return [name.replace("_", " ") for name in self._classes]


class ObjectNetSet(FileSet):
    """The 113 classes that ObjectNet shares with ImageNet, from `objectnet-1.0/images` and its four mapping files.

    Args:
        border_crop: first remove the red border of two pixels, as in wise-ft; clip-benchmark does not.
    """

    def __init__(self, root: str | Path, border_crop: bool = True):
        folder = Path(root)
        top = folder / "objectnet-1.0" if (folder / "objectnet-1.0").is_dir() else folder
        # ObjectNet's own class names, because ImageNet's names of the same classes differ.
        names_of = _json(_mapping(folder, "folder_to_objectnet_label.json"))
        shared = set(_json(_mapping(folder, "objectnet_to_imagenet_1k.json")))
        folders = sorted(name for name, label in names_of.items() if label in shared)
        missing = shared - set(names_of.values())
        if missing:
            raise DataError(f"{folder}: folder_to_objectnet_label.json lacks {sorted(missing)[0]!r}")
        # By ObjectNet's folders, because one of its classes may be several of ImageNet's.
        place = {name: i for i, name in enumerate(folders)}
        names = [n for part in open_folder(top / "images", "root", mixed=False) for n in part.names()]
        names = [name for name in names if name.partition("/")[0] in place]
        super().__init__(top / "images", names, [place[name.partition("/")[0]] for name in names], "label")
        self._classnames, self.border_crop = [names_of[name].lower() for name in folders], border_crop

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        key, image, fact = super().read(number)
        if self.border_crop:
            image = image.crop((2, 2, image.width - 2, image.height - 2))
        return key, image, fact

    def identity(self) -> str:
        return sha256(super().identity(), f"border_crop {self.border_crop}")

    def classnames(self) -> list[str]:
        return self._classnames

    def templates(self) -> list[str]:
        return imagenet_templates()


def imagenet_templates() -> list[str]:
    """Return OpenAI's 80 templates, with `{c}`."""
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    return [template("{c}") for template in OPENAI_IMAGENET_TEMPLATES]


@cache
def wordnet_ids() -> list[str]:
    """Return ImageNet's 1,000 WordNet ids in the order of its classes, from timm's table."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations
    table = Path(spec.submodule_search_locations[0]) / "data" / "_info" / "imagenet_synsets.txt"
    return table.read_text(encoding="utf-8").split()


def _mapping(folder: Path, name: str) -> Path:
    # As the archive unpacks, or moved to the top.
    for place in (folder, folder / "mappings", folder / "objectnet-1.0" / "mappings"):
        if (place / name).is_file():
            return place / name
    raise DataError(f"{folder / name}: no such file. Copy it from the folder `mappings` of ObjectNet's archive.")


def _json(path: Path) -> Mapping[str, str]:
    mapping = read_json(path, dict, DataError)
    if not all(isinstance(value, str) for value in mapping.values()):
        raise DataError(f"{path}: must be a mapping whose keys and values are names. Fetch it again.")
    return mapping


def _split_folder(config: SetTaskConfig, split: str) -> Path:
    """Return ROOT/SPLIT, or ROOT if a set with one split has no folder for it."""
    folder = Path(config.root) / split
    if folder.is_dir():
        return folder
    if split != config.split:
        raise DataError(f"{folder}: missing; layout {config.layout} has a folder per split")
    return Path(config.root)


def _imagenet(config: SetTaskConfig, split: str, numbered: bool) -> ImageNetSet:
    return ImageNetSet(_split_folder(config, split), getattr(config, "classes", None), numbered=numbered)


FOLDER = Layout(("label",), lambda config, _kind, split: FolderSet(_split_folder(config, split)))
IMAGENET = Layout(("label",), lambda config, _kind, split: _imagenet(config, split, numbered=False))
IMAGENETV2 = Layout(("label",), lambda config, _kind, split: _imagenet(config, split, numbered=True))
OBJECTNET = Layout(
    ("label",), lambda config, _kind, _split: ObjectNetSet(config.root, getattr(config, "border_crop", True))
)
