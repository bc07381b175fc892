"""Multi-crop (Caron et al. 2020): two large and several small views of an image, augmented as in the official DINO code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import cv2
import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor

from ...core.config import Frozen, between, field
from ...core.disk.metrics import Sample
from ..decode.bands import tifffile_module
from ..read.loader import Examples, OnStage, as_samples, ignore_stage
from ..sources.base import DataConfig, Source
from .image_transforms import Picture, flip, get_size, random_resized_crop_box, resized_crop
from .masking import Masking
from .samples import decode_for_training, image_bytes

Pixels = np.ndarray

_LEVELS = np.arange(256)
# Optical density of red, green and blue per amount of hematoxylin, eosin and DAB.
_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
_STAINS_INVERSE = np.linalg.inv(_STAINS)
_INVERTED = np.where(_LEVELS < 128, _LEVELS, 255 - _LEVELS).astype(np.uint8)  # PIL's default threshold of solarize


# DINO's pixel augmentations on uint8 arrays (H, W, 3), or (H, W, bands) with brightness, contrast and blur only (OpenCV
# drops the last dimension of a single band): operations and distributions of torchvision and PIL, with
# OpenCV's kernels. Random numbers come from the sample's own generator. Compared with PIL, pixels differ by rounding in
# colour operations and by up to three levels in the blur, because PIL approximates the Gaussian by boxes.
def jitter(x: Pixels, strength: tuple[float, float, float, float], rng: np.random.Generator) -> Pixels:
    """Apply torchvision's ColorJitter(brightness, contrast, saturation, hue): factors uniform in 1 ± strength, in random order.

    Images with other bands than red, green and blue have one mean for the contrast, and neither saturation nor hue.
    """
    # Draw all factors first, used or not, as in torchvision.
    bright, contrast, saturation = (rng.uniform(max(0.0, 1 - s), 1 + s) for s in strength[:3])
    shift = rng.uniform(-strength[3], strength[3])
    for number in rng.permutation(4):
        if number == 0 and strength[0]:
            x = _levels(x, bright, 0.0)
        elif number == 1 and strength[1]:
            # Round the mean like PIL's contrast enhancement does.
            luma = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY) if x.ndim == 3 and x.shape[2] == 3 else x
            mean = float(int(luma.mean() + 0.5))
            x = _levels(x, contrast, mean)
        elif number == 2 and strength[2]:
            x = cv2.addWeighted(x, saturation, gray(x), 1 - saturation, 0)
        elif number == 3 and strength[3]:
            x = hue(x, shift)
    return x


def gray(x: Pixels) -> Pixels:
    """Return the luma in three equal channels (RandomGrayscale)."""
    return cv2.cvtColor(cv2.cvtColor(x, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def hue(x: Pixels, shift: float) -> Pixels:
    """Rotate the hue by `shift` of a full circle."""
    hsv = cv2.cvtColor(x, cv2.COLOR_RGB2HSV_FULL)
    # Eight-bit arithmetic wraps around, as hue does.
    hsv[..., 0] += np.uint8(int(shift * 255) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def blur(x: Pixels, radius: tuple[float, float], rng: np.random.Generator) -> Pixels:
    """Blur with a Gaussian whose sigma is uniform in `radius` (pixels)."""
    return cv2.GaussianBlur(x, (0, 0), float(rng.uniform(*radius)))


def stain(x: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Change the amounts of hematoxylin, eosin and DAB (Tellez et al. 2018): each is scaled by 1 ± strength and shifted by ± strength.

    Amounts are optical densities in the basis of Ruifrok and Johnston (2001).
    """
    scale, shift = rng.uniform(1 - strength, 1 + strength, 3), rng.uniform(-strength, strength, 3)
    amounts = -np.log((x.reshape(-1, 3) + 1.0) / 256) @ _STAINS_INVERSE
    pixels = 256 * np.exp(-(amounts * scale + shift) @ _STAINS) - 1
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8).reshape(x.shape)


def solarize(x: Pixels) -> Pixels:
    """Invert levels from 128 on."""
    return cv2.LUT(x, _INVERTED)


def _levels(x: Pixels, factor: float, around: float) -> Pixels:
    """Apply PIL's enhancement: around + factor * (x - around), clipped to 0..255."""
    table = np.clip(around + factor * (_LEVELS - around), 0, 255).astype(np.uint8)
    return cv2.LUT(x, table)


def jitter_strength(value: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """Return the strengths of brightness, contrast, saturation and hue. Raises `ValueError` if one is out of range."""
    if min(value) < 0 or value[3] > 0.5:
        raise ValueError("no value may be below 0, and hue must be at most 0.5")
    return value


class CropsConfig(Frozen):
    """Crops of `main_dino.py` and its DataAugmentationDINO. Global crops have the model's `image_size`."""

    local_crops_number: int = field(
        8, "Number of local crops per image, in addition to the two global crops.", ge=0, le=1000
    )
    local_size: int = field(96, "Side of a local crop in pixels.", gt=0, le=16384)
    global_crops_scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.4, 1.0), "Smallest and largest area of a global crop, as a share of the image area."
    )
    local_crops_scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.05, 0.4), "Smallest and largest area of a local crop, as a share of the image area."
    )
    tile: int | None = field(
        None,
        "For large images, such as slides and aerial images: draw all crops of a sample from one square region. Value: "
        "the region's side, in pixels of the stored image. The region has a random position each time the image is "
        "read. If the image is narrower or lower than this side, the region covers its full width or height. Default: the "
        "whole image.",
        gt=0,
        examples=[512],
    )
    hflip: float = field(0.5, "Probability of a horizontal flip, per crop.", ge=0, le=1)
    vflip: float = field(
        0.0, "Probability of a vertical flip, per crop, for images without an upright position.", ge=0, le=1
    )
    rotate90: float = field(
        0.0,
        "Probability of a rotation by 90, 180 or 270 degrees, per crop, for images without an upright position.",
        ge=0,
        le=1,
    )
    stain: float = field(
        0.0,
        "Strength of stain jitter for histology: changes of hematoxylin, eosin and DAB, applied to each crop. 0: none.",
        ge=0,
        le=1,
    )
    jitter: Annotated[tuple[float, float, float, float], AfterValidator(jitter_strength)] = field(
        (0.4, 0.4, 0.2, 0.1), "Strength of the colour jitter: brightness, contrast, saturation, hue."
    )
    jitter_prob: float = field(0.8, "Probability of the colour jitter, per crop.", ge=0, le=1)
    gray_prob: float = field(0.2, "Probability of converting a crop to grayscale.", ge=0, le=1)
    blur_probs: Annotated[tuple[float, float, float], between(0, 1)] = field(
        (1.0, 0.1, 0.5), "Probability of Gaussian blur: first global crop, second global crop, local crops."
    )
    blur_radius: Annotated[tuple[float, float], between(0.01, 1000, rising=True)] = field(
        (0.1, 2.0), "Smallest and largest radius of the blur in pixels."
    )
    solarize_prob: float = field(0.2, "Probability of solarizing the second global crop.", ge=0, le=1)


def crop(picture: Picture, size: int, number: int, config: CropsConfig, rng: np.random.Generator) -> np.ndarray:
    """Return view `number` of a picture (0, 1: global crops), (size, size, 3) uint8."""
    return colours(region(picture, (size,), number, config, rng)[0], number, config, rng)


def region(
    picture: Picture, sizes: Sequence[int], number: int, config: CropsConfig, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the random region of a picture that view `number` shows, flipped and turned, at each of these sizes."""
    c = config
    box = random_resized_crop_box(get_size(picture), c.global_crops_scale if number < 2 else c.local_crops_scale, rng)
    views = [resized_crop(picture, box, size) for size in sizes]
    if rng.random() < c.hflip:
        views = [flip(x) for x in views]
    # Drawn only if they are used, so that runs without them have the same random numbers as before these keys existed.
    if c.vflip and rng.random() < c.vflip:
        views = [np.ascontiguousarray(x[::-1]) for x in views]
    if c.rotate90 and rng.random() < c.rotate90:
        turns = int(rng.integers(1, 4))
        views = [np.ascontiguousarray(np.rot90(x, turns)) for x in views]
    return views


def colours(pixels: np.ndarray, number: int, config: CropsConfig, rng: np.random.Generator) -> np.ndarray:
    """Change the colours and the sharpness of view `number`, at random."""
    c = config
    if c.stain:
        pixels = stain(pixels, c.stain, rng)
    if rng.random() < c.jitter_prob:
        pixels = jitter(pixels, c.jitter, rng)
    if rng.random() < c.gray_prob:
        pixels = gray(pixels)
    # Three rates for three kinds of view, because the two global crops are blurred differently (BYOL's asymmetry).
    if rng.random() < c.blur_probs[min(number, 2)]:
        pixels = blur(pixels, c.blur_radius, rng)
    if number == 1 and rng.random() < c.solarize_prob:
        pixels = solarize(pixels)
    return pixels


def random_tile(picture: Picture, side: int, rng: np.random.Generator) -> Picture:
    """Return a random region of at most `side` x `side` pixels."""
    width, height = get_size(picture)
    left, top = (int(rng.integers(0, max(0, length - side) + 1)) for length in (width, height))
    if isinstance(picture, np.ndarray):
        return picture[top : top + side, left : left + side]
    return picture.crop((left, top, min(width, left + side), min(height, top + side)))


def multi_crop(
    picture: Picture, size: int, config: CropsConfig, rng: np.random.Generator, plain_size: int | None = None
) -> dict[str, np.ndarray]:
    """Return the views of a picture, uint8.

    Args:
        picture: image; an array may have any number of bands.
        size: pixels per side of a global crop.
        config: numbers, sizes and distributions.
        rng: the sample's random stream.
        plain_size: return the global crops at this size, too, without changes of colour; None: do not.

    Returns:
        `global_crops` (2, C, size, size), `local_crops` (n, C, local_size, local_size) unless n is 0, and with
        `plain_size` `plain_crops` (2, C, plain_size, plain_size).
    """
    kinds = {"global_crops": (0, 2, size), "local_crops": (2, config.local_crops_number, config.local_size)}
    bands = picture.shape[2] if isinstance(picture, np.ndarray) else 3
    # One array per kind of view, so that workers transfer two arrays per image instead of ten.
    out = {key: np.empty((count, bands, side, side), np.uint8) for key, (_, count, side) in kinds.items() if count}
    if plain_size is not None:
        out["plain_crops"] = np.empty((2, bands, plain_size, plain_size), np.uint8)
    for key, (first, count, side) in kinds.items():
        for number in range(count):
            sizes = (side,) if plain_size is None or key == "local_crops" else (side, plain_size)
            views = region(picture, sizes, first + number, config, rng)
            cv2.split(colours(views[0], first + number, config, rng), [*out[key][number]])
            for plain in views[1:]:
                cv2.split(plain, [*out["plain_crops"][number]])
    return out


class CropExamples(Examples):
    """Images as multi-crops; captions are not read.

    Batches contain `global_crops` (B, 2, C, S, S) and `local_crops` (B, n, C, s, s) uint8, where C is 3 or the
    number of `data.bands`, and `drop` (B, 2 + n, paths)
    int32, drawn from the sample's own random stream, so that it does not depend on how the batch is split; with
    `plain_size` also `plain_crops` (B, 2, C, P, P) uint8.

    Args:
        config: the recipe's `data` block.
        crops: the recipe's `objective.crops`.
        image_size: pixels per side of the global crops.
        paths: residual branches for which drop path draws (2 * blocks); 0: no drop path.
        drop_range: exclusive upper bound of the random integers.
        masking: masks of the global crops, for `masked` (B, most) int32; None: no masks.
        plain_size: pixels per side of global crops with unchanged colours; None: none.
    """

    def __init__(
        self,
        config: DataConfig,
        crops: CropsConfig,
        image_size: int,
        paths: int = 0,
        drop_range: int = 1 << 24,
        masking: Masking | None = None,
        plain_size: int | None = None,
    ):
        if config.bands is not None:
            tifffile_module()  # fail before the first batch
        self.masking, self.plain_size = masking, plain_size
        self.config, self.crops, self.image_size = config, crops, image_size
        self.paths, self.drop_range = paths, drop_range

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        data = image_bytes(fields, source.config.image_keys)
        # JPEG decoding may halve the size until twice the crop: a global crop of 40 % of the area still has enough
        # pixels.
        tile = self.crops.tile
        wanted = max(self.image_size, self.plain_size or 0)
        picture = decode_for_training(data, self.config, None if tile else wanted)
        on_stage("decode")
        if tile:
            picture = random_tile(picture, tile, rng)
        example = multi_crop(picture, self.image_size, self.crops, rng, self.plain_size)
        if self.paths:
            # From the sample's stream, so that dropped paths do not depend on the rank that reads the sample.
            views = 2 + self.crops.local_crops_number
            example["drop"] = rng.integers(0, self.drop_range, (views, self.paths), dtype=np.int32)
        if self.masking is not None:
            example["masked"] = self.masking.draw(rng)
        on_stage("augment")
        return example

    def stack(self, examples: Any) -> dict[str, Tensor]:
        return {key: torch.from_numpy(np.stack([e[key] for e in examples])) for key in examples[0]}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        return as_samples(batch["global_crops"][:count, 0])
