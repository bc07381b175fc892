"""Sets as their authors publish them: those that torchvision reads and verifies, SUN397, CLEVR, and others of VTAB (vtab_files.py).

Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision import datasets

from sparo_train.core.errors import ConfigError, DataError, did_you_mean

from .base import OWN, EvalSet, Fact, Layout, lines, sha256, sizes_of
from .image_files import FileSet
from .tfds_set import SPECS
from .vtab_files import open_vtab

_READERS: dict[str, Callable[[str, str], Any]] = {
    "cifar10": lambda root, split: datasets.CIFAR10(root, train=_one_of(split, "train", "test") == "train"),
    "vtab/cifar100": lambda root, split: datasets.CIFAR100(root, train=_one_of(split, "train", "test") == "train"),
    "vtab/dtd": lambda root, split: datasets.DTD(root, split),
    "vtab/flowers": lambda root, split: datasets.Flowers102(root, split),
    "vtab/pcam": lambda root, split: datasets.PCAM(root, split),
    "vtab/pets": lambda root, split: datasets.OxfordIIITPet(root, "trainval" if split == "train" else split),
    "vtab/svhn": lambda root, split: datasets.SVHN(root, split),
}
_CLEVR = {"vtab/clevr_count_all": "count", "vtab/clevr_closest_object_distance": "distance"}
_DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0)  # VTAB's class borders of the closest object's distance, in CLEVR's pixel depth
_ARCHIVES = {".gz", ".tgz", ".tar", ".zip"}
SETS = [*_READERS, *_CLEVR, *SPECS, "sun397"]


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
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).removesuffix(" You can use download=True to download it")
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
        return f"{self._split}/{number:06d}", image, int(label)

    def identity(self) -> str:
        names = [path.relative_to(self.root).as_posix() for path in self._files]
        return sha256("torchvision", str(self.benchmark_name), self._split, json.dumps(names), self._stat[0])

    def stamp(self) -> str:
        return sha256(self._stat[1])

    def own_classnames(self) -> list[str]:
        return list(getattr(self._samples, "classes", []))

    @cached_property
    def _files(self) -> list[Path]:
        # Archives next to their content are not read.
        files = (path for path in self.root.rglob("*") if path.suffix not in _ARCHIVES and path.is_file())
        return sorted(path for path in files if path.name not in OWN.values())

    @cached_property
    def _stat(self) -> tuple[bytes, bytes]:
        return sizes_of(self._files)


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


def _one_of(split: str, *choices: str) -> str:
    if split not in choices:
        raise ValueError(f"known splits are {', '.join(choices)}")
    return split


LAYOUT = Layout(("label",), lambda config, _kind, split: open_library(config.root, config.benchmark_name, split))
