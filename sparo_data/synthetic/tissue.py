"""Tiles that look like stained tissue sections: five classes of tissue, patients with different stains, masks and counts.

The set has what makes labels of real slides difficult: classes of unequal size, many tiles per patient, and a stain
that reveals the patient. Tiles are deterministic in (seed, number).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from sparo_train.core.config import Frozen, field
from sparo_train.core.files import write_whole
from sparo_train.core.rng import generator

from ..pool import process_pool
from ..writer import encode_image, write_manifest

TISSUES = {"stroma": 0.4, "tumour": 0.25, "lymphocytes": 0.15, "gland": 0.12, "fat": 0.08}  # name: share of tiles
FINDINGS = ("pigment", "vessel", "calcification")
MASK_CLASSES = ("stroma", "nucleus", "lumen")  # values of a mask: 0, 1, 2
_FINER = 3  # tiles are drawn at this multiple of their size and then reduced
_Point = tuple[float, float]


class TissueConfig(Frozen):
    """Options. Equal configs give equal bytes."""

    seed: int = field(0, "Random seed of all tiles.")
    patients: int = field(
        40, "Number of patients, each with a different stain. A fifth of them are in the test split.", ge=5
    )
    tiles: int = field(50, "Tiles per patient.", gt=0)
    size: int = field(48, "Width and height of a tile, in pixels.", ge=32)


class Tile(NamedTuple):
    """A tile.

    Attributes:
        image: (S, S, 3) uint8.
        mask: (S, S) uint8, an index of `MASK_CLASSES` per pixel.
        tissue: a key of `TISSUES`.
        nuclei: number of nuclei.
        findings: names of `FINDINGS` that are visible.
    """

    image: np.ndarray
    mask: np.ndarray
    tissue: str
    nuclei: int
    findings: list[str]


class _Canvas:
    """A tile while it is drawn: the image and its mask, in coordinates from 0 to 1."""

    def __init__(self, size: int, rng: np.random.Generator):
        self.side, self.rng, self.nuclei = size * _FINER, rng, 0
        self.image = Image.new("RGB", (self.side, self.side), (236, 190, 208))
        self.mask = Image.new("L", (self.side, self.side), 0)
        self._image, self._mask = ImageDraw.Draw(self.image), ImageDraw.Draw(self.mask)

    def blob(self, at: _Point, radii: _Point, turn: float, color: tuple[int, int, int], kind: int | None) -> None:
        """Draw an ellipse with an irregular outline. `kind`: its value in the mask; None: the mask stays as it is."""
        angles = np.linspace(0, 2 * math.pi, 24, endpoint=False)
        wobble = 1 + 0.12 * np.sin(3 * angles + self.rng.uniform(0, 6)) * self.rng.uniform(0, 1)
        x, y = radii[0] * wobble * np.cos(angles), radii[1] * wobble * np.sin(angles)
        points = np.stack([at[0] + x * np.cos(turn) - y * np.sin(turn), at[1] + x * np.sin(turn) + y * np.cos(turn)], 1)
        outline = [(float(px), float(py)) for px, py in points * self.side]
        self._image.polygon(outline, fill=color)
        if kind is not None:
            self._mask.polygon(outline, fill=kind)

    def nucleus(self, at: _Point, radius: float, stretch: float, turn: float, pale: float = 0.0) -> None:
        """Draw a nucleus; `pale` from 0 (dark violet) to 1."""
        dark, light = np.array([72, 45, 120]), np.array([150, 110, 175])
        color = dark + (light - dark) * np.clip(pale + self.rng.normal(0, 0.08), 0, 1)
        red, green, blue = (int(v) for v in color)
        self.blob(at, (radius * stretch, radius / stretch), turn, (red, green, blue), 1)
        self.nuclei += 1

    def fibres(self, turn: float) -> None:
        """Draw wavy fibres across the tile in one direction."""
        for shift in np.arange(-0.8, 0.8, self.rng.uniform(0.05, 0.09)):
            t = np.linspace(-0.8, 0.8, 12)
            wave = shift + 0.02 * np.sin(9 * t + self.rng.uniform(0, 6))
            x, y = 0.5 + t * np.cos(turn) - wave * np.sin(turn), 0.5 + t * np.sin(turn) + wave * np.cos(turn)
            line = [(float(px), float(py)) for px, py in np.stack([x, y], 1) * self.side]
            self._image.line(line, fill=(222, 150, 180), width=_FINER)

    def spread(self, count: int, gap: float) -> list[_Point]:
        """Return up to `count` points with at least `gap` between them."""
        points: list[_Point] = []
        for _ in range(count * 8):
            point = (float(self.rng.uniform(0.03, 0.97)), float(self.rng.uniform(0.03, 0.97)))
            if len(points) < count and all(math.dist(point, other) >= gap for other in points):
                points.append(point)
        return points


def _stroma(canvas: _Canvas, rng: np.random.Generator) -> None:
    turn = rng.uniform(0, math.pi)
    canvas.fibres(turn)
    for at in canvas.spread(int(rng.integers(3, 9)), 0.15):
        canvas.nucleus(at, 0.045, 1.7, turn + rng.normal(0, 0.2))


def _tumour(canvas: _Canvas, rng: np.random.Generator) -> None:
    for at in canvas.spread(int(rng.integers(12, 20)), 0.17):
        canvas.nucleus(at, rng.uniform(0.06, 0.095), rng.uniform(1.0, 1.3), rng.uniform(0, 3), 0.7)


def _lymphocytes(canvas: _Canvas, rng: np.random.Generator) -> None:
    for at in canvas.spread(int(rng.integers(25, 45)), 0.1):
        canvas.nucleus(at, 0.045, 1.0, 0.0)


def _gland(canvas: _Canvas, rng: np.random.Generator) -> None:
    canvas.fibres(rng.uniform(0, math.pi))
    center = (float(rng.uniform(0.4, 0.6)), float(rng.uniform(0.4, 0.6)))
    radius, stretch = rng.uniform(0.22, 0.32), rng.uniform(0.85, 1.15)
    canvas.blob(center, (radius * 1.45, radius * 1.45), 0.0, (214, 160, 196), None)
    canvas.blob(center, (radius * 0.75 * stretch, radius * 0.75 / stretch), 0.0, (246, 242, 245), 2)
    count = int(rng.integers(11, 17))
    for i in range(count):
        angle = 2 * math.pi * i / count + rng.normal(0, 0.05)
        at = (center[0] + 1.12 * radius * math.cos(angle), center[1] + 1.12 * radius * math.sin(angle))
        canvas.nucleus(at, 0.05, 1.3, angle, 0.3)


def _fat(canvas: _Canvas, rng: np.random.Generator) -> None:
    for at in canvas.spread(int(rng.integers(5, 9)), 0.3):
        radius = rng.uniform(0.13, 0.18)
        canvas.blob(at, (radius, radius), 0.0, (247, 244, 246), 2)
    for at in canvas.spread(int(rng.integers(1, 5)), 0.3):
        canvas.nucleus(at, 0.03, 1.6, rng.uniform(0, 3))


_DRAW: dict[str, Callable[[_Canvas, np.random.Generator], None]] = {
    "stroma": _stroma, "tumour": _tumour, "lymphocytes": _lymphocytes, "gland": _gland, "fat": _fat,
}  # fmt: skip


def _draw_finding(canvas: _Canvas, finding: str, rng: np.random.Generator) -> None:
    at = (float(rng.uniform(0.2, 0.8)), float(rng.uniform(0.2, 0.8)))
    if finding == "pigment":  # brown grains
        for _ in range(8):
            near = (at[0] + rng.normal(0, 0.07), at[1] + rng.normal(0, 0.07))
            canvas.blob(near, (0.025, 0.025), 0.0, (120, 80, 30), 0)
    elif finding == "vessel":  # a ring with red cells
        canvas.blob(at, (0.16, 0.14), 0.0, (205, 120, 160), 0)
        canvas.blob(at, (0.11, 0.1), 0.0, (200, 40, 50), 0)
    else:  # a dark grain
        canvas.blob(at, (0.09, 0.07), rng.uniform(0, 3), (70, 70, 110), 0)


def render_tile(config: TissueConfig, number: int) -> Tile:
    """Render tile `number`; it belongs to patient `number // config.tiles`."""
    patient = generator(config.seed, "patient", number // config.tiles)
    # The mix of tissues differs between patients, so the stain is correlated with the class.
    shares = np.array(list(TISSUES.values())) * patient.gamma(2.0, 0.5, len(TISSUES))
    stain = patient.uniform([0.85, 0.75, 0.85], [1.1, 1.1, 1.1])
    rng = generator(config.seed, "tile", number)
    tissue = list(TISSUES)[rng.choice(len(TISSUES), p=shares / shares.sum())]
    canvas = _Canvas(config.size, rng)
    _DRAW[tissue](canvas, rng)
    findings = [name for name in FINDINGS if rng.random() < 0.15]
    for name in findings:
        _draw_finding(canvas, name, rng)
    size = (config.size, config.size)
    pixels = np.asarray(canvas.image.resize(size, Image.Resampling.BOX), np.float32)
    # The stain multiplies optical density, not intensity.
    pixels = 255 * np.exp(np.log((pixels + 1) / 256) * stain) + rng.normal(0, 4, pixels.shape)
    mask = np.asarray(canvas.mask.resize(size, Image.Resampling.NEAREST))
    return Tile(pixels.clip(0, 255).round().astype(np.uint8), mask, tissue, canvas.nuclei, findings)


def tissue_set(root: Path, config: TissueConfig, processes: int = 1) -> dict[str, int]:
    """Write `images/PATIENT/NUMBER.png`, masks of the same names in `masks/`, and `tissue.csv`; return the tiles of each split.

    The columns are image, mask, tissue, patient, split, nuclei (their number) and findings (names separated by semicolons).
    """
    write_manifest(root, config, "tissue.json")
    rows, counts = [], {"train": 0, "test": 0}
    with process_pool(processes, config.patients) as pool:
        jobs = [pool.submit(_write_patient, root, config, patient) for patient in range(config.patients)]
        for patient, job in enumerate(jobs):
            split = "test" if patient % 5 == 4 else "train"
            counts[split] += config.tiles
            rows += [
                (f"images/{name}", f"masks/{name}", *facts[:2], split, *facts[2:]) for name, *facts in job.result()
            ]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("image", "mask", "tissue", "patient", "split", "nuclei", "findings"))
    table.writerows(rows)
    write_whole(root / "tissue.csv", text.getvalue())  # last: a folder without it is not complete
    return counts


def _write_patient(root: Path, config: TissueConfig, patient: int) -> list[tuple[str, str, str, int, str]]:
    name = f"p{patient:03d}"
    for folder in ("images", "masks"):
        (root / folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(patient * config.tiles, (patient + 1) * config.tiles):
        tile = render_tile(config, number)
        file = f"{name}/{number:06d}.png"
        (root / "images" / file).write_bytes(encode_image(tile.image))
        (root / "masks" / file).write_bytes(encode_image(tile.mask))
        rows.append((file, tile.tissue, name, tile.nuclei, ";".join(tile.findings)))
    return rows
