"""Sets as their authors publish them: those that torchvision reads and verifies, SUN397, VOC 2007, CLEVR, and others of VTAB (vtab_files.py).

Nothing is downloaded.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision import datasets

from sparo_train.core.errors import ConfigError, DataError, did_you_mean
from sparo_train.core.files import read_text

from .base import OWN, EvalSet, Fact, Layout, lines, sha256, stat_files
from .image_files import FileSet
from .tfds_set import SPECS
from .vtab_files import open_vtab

_READERS: dict[str, Callable[[str, str], Any]] = {
    "cars": lambda root, split: datasets.StanfordCars(root, split),
    "cifar10": lambda root, split: datasets.CIFAR10(root, train=_check_choice(split, "train", "test") == "train"),
    "country211": lambda root, split: datasets.Country211(root, split),
    "fgvc_aircraft": lambda root, split: datasets.FGVCAircraft(root, split),
    "food101": lambda root, split: datasets.Food101(root, split),
    "gtsrb": lambda root, split: datasets.GTSRB(root, split),
    "mnist": lambda root, split: datasets.MNIST(root, train=_check_choice(split, "train", "test") == "train"),
    "renderedsst2": lambda root, split: datasets.RenderedSST2(root, split),
    "stl10": lambda root, split: datasets.STL10(root, split),
    "vtab/cifar100": lambda root, split: datasets.CIFAR100(
        root, train=_check_choice(split, "train", "test") == "train"
    ),
    "vtab/dtd": lambda root, split: datasets.DTD(root, split),
    "vtab/flowers": lambda root, split: datasets.Flowers102(root, split),
    "vtab/pcam": lambda root, split: datasets.PCAM(root, split),
    "vtab/pets": lambda root, split: datasets.OxfordIIITPet(root, "trainval" if split == "train" else split),
    "vtab/svhn": lambda root, split: datasets.SVHN(root, split),
}
_CLEVR = {"vtab/clevr_count_all": "count", "vtab/clevr_closest_object_distance": "distance"}
_DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0)  # VTAB's class borders of the closest object's distance, in CLEVR's pixel depth
_ARCHIVES = {".gz", ".tgz", ".tar", ".zip"}
SETS = [*_READERS, *_CLEVR, *SPECS, "sun397", "voc2007"]


def open_library(root: str | Path, name: str | None, split: str) -> EvalSet:
    """Open one of `SETS` in the folder that torchvision calls its `root`.

    Raises:
        ConfigError: an unknown name.
        DataError: files are missing, or are not the published ones (torchvision's MD5 sums).
    """
    folder = Path(root)
    if name in _CLEVR:
        return ClevrSet(folder, _CLEVR[name], split)
    if name in SPECS:
        return open_vtab(folder, name, split)
    if name == "sun397":
        if split != "test":
            raise DataError(f"{folder}: SUN397 as published has no split {split}. Use a folder in the wds layout.")
        return SunSet(folder)
    if name == "voc2007":
        return VocSet(folder, split)
    if name not in _READERS:
        raise ConfigError(f"layout=torchvision: benchmark_name={name}: {did_you_mean(str(name), SETS)}")
    return TorchvisionSet(folder, name, split)


class TorchvisionSet(EvalSet):
    """A set of `torchvision.datasets`; keys are its sample numbers."""

    kind = "label"

    def __init__(self, root: Path, name: str, split: str):
        self.root, self.benchmark_name, self._split = root, name, split
        try:
            self._samples = _READERS[name](str(root), split)
        except Exception as error:  # damaged files may raise anything, such as a KeyError for a missing column
            known = isinstance(error, OSError | RuntimeError | ValueError)
            reason = str(error).removesuffix(" You can use download=True to download it")
            reason = reason if known else f"{type(error).__name__}: {reason}"
            raise DataError(
                f"{root}: {name}, split {split}: {reason.rstrip('.')}. Download it yourself; sparo does not download data sets."
            ) from None

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        try:
            image, label = self._samples[number]
        except OSError as error:
            raise DataError(f"{self.root}: {self.benchmark_name}, sample {number}: cannot be read ({error})") from None
        # MNIST has gray levels.
        return f"{self._split}/{number:06d}", image if image.mode == "RGB" else image.convert("RGB"), int(label)

    def identity(self) -> str:
        names = [path.relative_to(self.root).as_posix() for path in self._files]
        return sha256("torchvision", str(self.benchmark_name), self._split, json.dumps(names), self._stat[0])

    def stamp(self) -> str:
        return sha256(self._stat[1])

    def own_classnames(self) -> list[str]:
        names = [str(name) for name in getattr(self._samples, "classes", [])]
        # Like clip-benchmark, which keeps the names of its other sets as they are.
        return [name.replace("_", " ") for name in names] if self.benchmark_name == "food101" else names

    @cached_property
    def _files(self) -> list[Path]:
        # Archives next to their content are not read.
        files = (path for path in self.root.rglob("*") if path.suffix not in _ARCHIVES and path.is_file())
        return sorted(path for path in files if path.name not in OWN.values())

    @cached_property
    def _stat(self) -> tuple[bytes, bytes]:
        return stat_files(self._files)


class SunSet(FileSet):
    """SUN397, all 108,754 images; clip-benchmark ignores the split, too."""

    def __init__(self, root: Path):
        top = root / "SUN397"
        classes = [line[3:].strip() for line in lines(top / "ClassName.txt")]  # /a/abbey
        place = {name: i for i, name in enumerate(classes)}
        names = sorted(path.relative_to(top).as_posix() for path in top.rglob("sun_*.jpg"))
        labels = [place.get(name.partition("/")[2].rpartition("/")[0], -1) for name in names]
        if -1 in labels:
            raise DataError(f"{top / names[labels.index(-1)]}: its folder is not a class of {top / 'ClassName.txt'}")
        super().__init__(top, names, labels, "label")
        self._classes = [name.replace("_", " ").replace("/", " ") for name in classes]

    def own_classnames(self) -> list[str]:
        return self._classes


_VOC_NAMES: str = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep sofa "
    "train tvmonitor"
)
VOC_CLASSES: list[str] = [*_VOC_NAMES.split()]


class VocSet(FileSet):
    """Pascal VOC 2007 as clip-benchmark classifies it: every annotated object, also difficult ones, is cropped and has one label."""

    def __init__(self, root: Path, split: str):
        top = next((p for p in (root / "VOCdevkit" / "VOC2007", root / "VOC2007") if p.is_dir()), root)
        listed = [line.split()[0] for line in lines(top / "ImageSets" / "Main" / f"aeroplane_{split}.txt")]
        classes, names, labels, self._boxes = self.own_classnames(), [], [], list[tuple[int, int, int, int]]()
        for name in listed:
            path = top / "Annotations" / f"{name}.xml"
            try:
                for thing in ElementTree.fromstring(read_text(path, DataError)).iter("object"):
                    left, top_edge, right, bottom = (
                        int(float(str(thing.findtext(f"bndbox/{side}")))) for side in ("xmin", "ymin", "xmax", "ymax")
                    )
                    labels.append(classes.index(str(thing.findtext("name"))))
                    self._boxes.append((left, top_edge, right, bottom))
                    names.append(f"JPEGImages/{name}.jpg")
            except (ElementTree.ParseError, ValueError, OverflowError) as error:
                raise DataError(f"{path}: is not an annotation of VOC 2007 ({error}). Fetch it again.") from None
        super().__init__(top, names, labels, "label", json.dumps(self._boxes).encode())

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        name, image, label = super().read(number)
        box = self._boxes[number]
        return f"{name}#{','.join(map(str, box))}", image.crop(box), label

    def own_classnames(self) -> list[str]:
        return VOC_CLASSES


class ClevrSet(FileSet):
    """CLEVR_v1.0's validation images as labelled in VTAB, by the number of objects or the closest one's distance."""

    def __init__(self, root: Path, task: str, split: str):
        top = next((p for p in (root / "CLEVR_v1.0", root / "clevr" / "CLEVR_v1.0") if p.is_dir()), root)
        part = "val" if split == "test" else split
        annotations = top / "scenes" / f"CLEVR_{part}_scenes.json"
        try:
            scenes = json.loads(annotations.read_text(encoding="utf-8"))["scenes"]
            facts = {scene["image_filename"]: _clevr_label(task, scene["objects"]) for scene in scenes}
            names = sorted(facts)  # names only: numbers cannot be sorted with them, and are not files
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(
                f"{annotations}: not CLEVR's scenes ({type(error).__name__}: {error}). Fetch it again."
            ) from None
        super().__init__(top / "images" / part, names, [facts[n] for n in names], "label")


def _clevr_label(task: str, objects: list[dict[str, Any]]) -> int:
    if task == "count":
        # VTAB counts from three, the minimum in CLEVR.
        return len(objects) - 3
    # side="left": a distance on a border belongs to the lower class, as in VTAB's own code.
    return int(np.searchsorted(_DISTANCES, min(thing["pixel_coords"][2] for thing in objects), side="left"))


def _check_choice(split: str, *choices: str) -> str:
    if split not in choices:
        raise ValueError(f"known splits are {', '.join(choices)}")
    return split


LAYOUT = Layout(("label",), lambda config, _kind, split: open_library(config.root, config.benchmark_name, split))
