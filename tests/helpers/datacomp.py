"""DataComp's evaluation folder, small: every set in its downloaded format, with made-up images and labels."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from evals.report.suite_layouts import DATACOMP
from sparo_data.writer import write_wds_layout

from .compositional import picture

METADATA = {
    "wilds/iwildcam": 10,
    "wilds/camelyon17": 4,
    "wilds/fmow": 4,
    "fairness/dollar_street": 3,
    "fairness/geode": 2,
}
CLASSES = {"renderedsst2": 2, "vtab/pcam": 2, "wilds/camelyon17": 2, "vtab/kitti_closest_vehicle_distance": 4}
FACES = ("age", "gender", "race", "race_binary")
TOXIC = [f"person {i}" for i in range(14)] + [f"animal {i}" for i in range(4)] + ["thief", "criminal"]


def write_datacomp(root: Path, n: int = 24) -> Path:
    """Write all 40 sets below root: sets of the hub as wds_…_test, retrieval and WinoGAViL as CSV files."""
    hub = [name for name, _ in DATACOMP if name not in ("flickr30k", "mscoco_captions", "misc/winogavil")]
    for seed, name in enumerate(hub):
        write_labelled(root, name, seed, n)
    for name in ("fairness/fairface", "fairness/utkface"):
        write_faces(root, name, 7, n)
    write_retrieval(root / "flickr30k", "test_1k_flickr.csv", "images_flickr_1k_test")
    write_retrieval(root / "mscoco_captions", "test_5k_mscoco_2014.csv", "images_mscoco_2014_5k_test")
    write_winogavil(root / "winogavil")
    return root


def folder_of(name: str) -> str:
    """Return the folder that DataComp's script downloads a set to."""
    return f"wds_{name.removeprefix('fairness/').replace('/', '-')}_test"


def png(rng: np.random.Generator) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def npy(values: list[int]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values))
    return buffer.getvalue()


def write_labelled(root: Path, name: str, seed: int, n: int) -> None:
    rng, classes = np.random.default_rng(seed), CLASSES.get(name, 7)
    samples = []
    for i in range(n):
        # Some classes and some group numbers do not occur.
        label = int(rng.integers(0, classes)) if classes < 5 or rng.random() < 0.8 else 0
        fields = {"png": png(rng), "cls": str(label).encode()}
        if width := METADATA.get(name):
            fields["npy"] = npy([int(value) for value in 2 * rng.integers(0, 3, width)])
        samples.append((f"s{i:07d}", fields))
    names = [f"{('red', 'small', 'old')[i % 3]} {('cat', 'dog', 'cup', 'tree')[i % 4]}" for i in range(classes)]
    write_wds_layout(root / folder_of(name), samples, classnames=names, templates=["a photo of {c}.", "{c} near"])


def write_faces(root: Path, name: str, seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        race = int(rng.integers(0, 4))
        row = [int(rng.integers(0, 3)), int(rng.integers(0, 2)), race, int(race != 1)]
        samples.append((f"s{i:07d}", {"png": png(rng), "npy": npy(row)}))
    names = [
        *(f"race:{race}" for race in ("black", "white", "indian", "asian")), "gender:male", "gender:female",
        *(f"age:{age}" for age in ("0-9", "10-19", "20: more")), *(f"toxic:{name}" for name in TOXIC),
    ]  # fmt: skip
    kinds = (
        "age:a person {c} old",
        "gender:a photo of a {c}",
        "race:a photo of a {c} person",
        "toxic:a photo of a {c}",
    )
    write_wds_layout(root / folder_of(name), samples, classnames=names, templates=list(kinds))


def write_retrieval(folder: Path, table: str, images: str) -> None:
    folder.mkdir(parents=True)
    with (folder / table).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["raw", "sentids", "split", "filename", "img_id"])
        writer.writeheader()
        for i in range(9):
            picture(folder / images / f"{i}.jpg", 500 + i)
            captions = [f'a "{("red", "old")[k % 2]}" cat by dog {i // 2}, twice' for k in range(5)]
            writer.writerow(
                {"raw": json.dumps(captions), "sentids": "[1]", "split": "test", "filename": f"{i}.jpg", "img_id": i}
            )


def write_winogavil(folder: Path) -> None:
    rng, folder_images = np.random.default_rng(3), folder / "winogavil_images"
    names = [f"thing {i}" for i in range(16)]
    for i, name in enumerate(names):
        picture(folder_images / f"{name}.jpg", 700 + (i % 12))  # some images are equal, which makes ties
    with (folder / "winogavil_dataset.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["", "candidates", "cue", "associations", "num_candidates", "ID"])
        writer.writeheader()
        for i in range(30):
            candidates = [names[k] for k in rng.choice(16, (5, 6, 10, 12)[i % 4], replace=False)]
            right = [candidates[k] for k in rng.choice(len(candidates), int(rng.integers(2, 4)), replace=False)]
            row = (i, json.dumps(candidates), ("Eagle", "cat")[i % 2], json.dumps(right), len(candidates), i)
            writer.writerow(dict(zip(writer.fieldnames, row, strict=True)))
