"""Time to score DataComp's 38 tasks from stored encodings, on sets of the published sizes.

    python benchmarks/evals_datacomp.py [--quick] [--width 512] [--json FILE]

Encodings are random. The first pass fills the store; the measured passes read it, like `sparo eval --suite datacomp` after
everything was encoded. Sizes, classes, templates and captions per image are the published ones (--quick: a fortieth of the
images).
"""

from __future__ import annotations

import hashlib
import resource
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import parser, report, row, seconds
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from evals.encoders.encoder import Encoder, TextEncoder
from evals.encoders.pixels import Pixels
from evals.feature_store.features import FeatureStore
from evals.report.suite_layouts import DATACOMP
from evals.sets.base import EvalSet, Fact, Layout, sha256
from evals.sets.questions import AssociationSet, ImageRef, Item
from evals.sets.task_config import SetTaskConfig
from evals.suite import catalogue
from evals.suite.suite import Suite
from sparo_train.core.registries import LAYOUTS

# Templates of DataComp's files where they are not those of ImageNet (80) or one.
TEMPLATES = {"cifar10": 18, "vtab/cifar100": 18, "vtab/caltech101": 34, "vtab/svhn": 6, "vtab/dtd": 8, "cars": 8}
_BAR = 120  # seconds
FEW = {"food101", "mnist", "vtab/pets", "vtab/flowers", "renderedsst2", "voc2007", "vtab/clevr_count_all"}


class RandomEncoder(Encoder, TextEncoder):
    """Encodings by a hash of the pixels or the text, at no cost."""

    image_size, architecture, text_weights = 1, "random", "random"  # type: ignore[assignment]

    def __init__(self, width: int):
        layer = nn.Linear(1, 1)
        super().__init__(layer, (0.0,) * 3, (1.0,) * 3, "random")
        self.size, self.transform = width, Pixels(1, 1)
        nn.init.zeros_(layer.weight)

    def encode(self, pixels: Tensor) -> Tensor:
        seed = int.from_bytes(pixels[0].numpy().tobytes(), "big")
        return torch.randn(len(pixels), self.size, generator=torch.Generator().manual_seed(seed))

    def text(self, captions: Sequence[str]) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(captions[0].encode()).digest()[:4], "big")
        return F.normalize(torch.randn(len(captions), self.size, generator=torch.Generator().manual_seed(seed)), dim=-1)


class StandIn(EvalSet):
    """A labelled or captioned set of the published size; every image is one pixel."""

    def __init__(self, entry: catalogue.DatasetEntry, kind: str, fraction: int):
        self.entry, self.kind, self.root = entry, kind, Path(entry.name)
        self._count = max(64, (entry.n or 0) // fraction)

    def __len__(self) -> int:
        return self._count

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        color = (number % 256, number // 256 % 256, number // 65536 % 256)
        return f"{self.entry.name}/{number:07d}.jpg", Image.new("RGB", (1, 1), color), self._fact(number)

    def _fact(self, number: int) -> Fact:
        if self.kind == "captions":
            return [f"{self.entry.name} caption {k} of image {number}" for k in range(5)]
        label = number % (self.entry.classes or 2)
        return label if self.kind == "label" else [label, number % 7, number % 5, label]

    def identity(self) -> str:
        return sha256(self.entry.name, str(self._count))

    def stamp(self) -> str:
        return ""

    def classnames(self) -> list[str]:
        return [f"class {i} of {self.entry.group}" for i in range(self.entry.classes or 2)]

    def templates(self) -> list[str]:
        count = TEMPLATES.get(
            self.entry.name, 1 if self.entry.name in FEW else 80 if (self.entry.classes or 0) > 39 else 4
        )
        return [f"template {i} of a {{c}}." for i in range(count)]


class Associations(AssociationSet):
    """WinoGAViL's 3,563 questions about 2,044 images."""

    def __init__(self, count: int):
        rng = np.random.default_rng(0)
        items = []
        for i in range(count):
            images = tuple(ImageRef(f"{k}.jpg") for k in rng.choice(2044, (5, 6, 10, 12)[i % 4], replace=False))
            items.append(Item(images, (f"A cue {i}",), "5-6" if i % 4 < 2 else "10-12", str(i), 2 + i % 2))
        super().__init__(Path("winogavil"), items, "stand-in")
        self.shares_images = False

    def read(self, number: int) -> tuple[str, Image.Image, Fact]:
        return self._names[number], Image.new("RGB", (1, 1), (number % 256, number // 256, 7)), self._facts[number]

    def identity(self) -> str:
        return sha256(str(len(self.questions)))

    def stamp(self) -> str:
        return ""


def stand_in_layout(fraction: int) -> Layout:
    entries = {entry.name: entry for entry in catalogue.datasets()}

    def open_one(config: SetTaskConfig, kind: str, _split: str) -> EvalSet:
        if kind == "associations":
            return Associations(3563 // fraction)
        return StandIn(entries[str(config.benchmark_name)], kind, fraction)

    return Layout(("label", "metadata", "captions", "associations"), open_one)


def suite_of(fraction: int) -> Suite:
    get = LAYOUTS.get
    LAYOUTS.get = lambda name, key="": stand_in_layout(fraction) if name == "stand_in" else get(name, key)  # type: ignore[method-assign]
    entries = {entry.name: entry for entry in catalogue.datasets()}
    tasks = {}
    for name, _ in DATACOMP:
        task = catalogue.make_task(entries[name], Path("data"), entries[name].task)
        tasks[name] = task.model_copy(update={"layout": "stand_in", "workers": 0, "columns": None})
    return Suite(tasks)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--width", type=int, default=512, help="numbers of an encoding")
    args = flags.parse_args()
    suite, rounds = suite_of(40 if args.quick else 1), 1 if args.quick else 3
    encoder = RandomEncoder(args.width)
    with tempfile.TemporaryDirectory() as folder:
        images = sum(suite.sizes().values())
        filled = seconds(partial(Suite(suite.tasks, FeatureStore(folder)).run, encoder))
        spent: dict[str, list[float]] = {name: [] for name in suite.tasks}
        for _ in range(rounds):
            store = FeatureStore(folder)  # reads everything again
            for name in suite.tasks:
                one = Suite({name: suite.tasks[name]}, store)
                spent[name].append(seconds(partial(one.run, encoder)))
    totals = [sum(times) for times in zip(*spent.values(), strict=True)]
    slowest = sorted(spent, key=lambda name: -min(spent[name]))[:5]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    title = f"38 tasks from stored encodings, {images:,} images, width {args.width} (bar: {_BAR} s)"
    rows: list[dict[str, Any]] = [
        row(title, [(total, _BAR) for total in totals], None if args.quick else 1, "s", False)
    ]
    report("scoring DataComp", rows, args.json)
    for name in slowest:
        print(f"{name}: {min(spent[name]):.1f} s")
    print(f"first pass, with encodings that cost nothing: {filled:.0f} s; peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()
