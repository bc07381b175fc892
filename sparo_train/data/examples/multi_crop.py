"""Multi-crop (Caron et al. 2020): two large and several small views of an image, augmented as the official DINO code does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator
from torch import Tensor

from ...core.config import Frozen, between, field
from ...core.disk.metric_loggers import Sample
from ..read.loader import Examples, OnStage, as_samples, ignore_stage
from ..read.sources import DataConfig, Source
from .dino_augment import blur, flip, gray, jitter, solarize
from .image_transforms import random_resized_crop_box, resized_crop
from .samples import decode_image, image_bytes


def _jitter(value: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    if min(value) < 0 or value[3] > 0.5:
        raise ValueError("none is below 0, and a hue's is at most 0.5: half of the circle")
    return value


class CropsConfig(Frozen):
    """`main_dino.py`'s crops and its DataAugmentationDINO. Global crops have the model's `image_size`."""

    local_crops_number: int = field(8, "local crops of an image, beside its two global ones", ge=0, le=1000)
    local_size: int = field(96, "pixels of a local crop's side", gt=0, le=16384)
    global_crops_scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.4, 1.0), "share of the image's area that a global crop covers"
    )
    local_crops_scale: Annotated[tuple[float, float], between(1e-6, 1, rising=True)] = field(
        (0.05, 0.4), "share of the image's area that a local crop covers"
    )
    hflip: float = field(0.5, "probability of mirroring a crop", ge=0, le=1)
    jitter: Annotated[tuple[float, float, float, float], AfterValidator(_jitter)] = field(
        (0.4, 0.4, 0.2, 0.1), "of brightness, contrast, saturation and hue"
    )
    jitter_prob: float = field(0.8, "probability of `jitter`", ge=0, le=1)
    gray_prob: float = field(0.2, "probability of a crop without colour", ge=0, le=1)
    blur_probs: Annotated[tuple[float, float, float], between(0, 1)] = field(
        (1.0, 0.1, 0.5), "of the first global crop, the second, the local ones"
    )
    blur_radius: Annotated[tuple[float, float], between(0.01, 1000, rising=True)] = field(
        (0.1, 2.0), "pixels, smallest and largest"
    )
    solarize_prob: float = field(0.2, "probability of solarizing the second global crop", ge=0, le=1)


def crop(image: Image.Image, size: int, number: int, config: CropsConfig, rng: np.random.Generator) -> np.ndarray:
    """View `number` of an image (0, 1: the global ones), (size, size, 3) uint8."""
    c = config
    pixels = resized_crop(
        image,
        random_resized_crop_box(image.size, c.global_crops_scale if number < 2 else c.local_crops_scale, rng),
        size,
    )
    if rng.random() < c.hflip:
        pixels = flip(pixels)
    if rng.random() < c.jitter_prob:
        pixels = jitter(pixels, c.jitter, rng)
    if rng.random() < c.gray_prob:
        pixels = gray(pixels)
    # Three rates for three kinds of view: global crops are not blurred alike (BYOL's asymmetry).
    if rng.random() < c.blur_probs[min(number, 2)]:
        pixels = blur(pixels, c.blur_radius, rng)
    if number == 1 and rng.random() < c.solarize_prob:
        pixels = solarize(pixels)
    return pixels


def multi_crop(
    image: Image.Image, size: int, config: CropsConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Global views (2, 3, size, size) and local ones (n, 3, local_size, local_size), uint8."""
    views = []
    for first, count, side in ((0, 2, size), (2, config.local_crops_number, config.local_size)):
        # One block for a kind of view: workers hand over two arrays per image, not ten.
        out = np.empty((count, 3, side, side), dtype=np.uint8)
        for number in range(count):
            out[number] = crop(image, side, first + number, config, rng).transpose(2, 0, 1)
        views.append(out)
    return views[0], views[1]


class CropExamples(Examples):
    """Images as multi-crops; captions are not read.

    Args:
        config: the recipe's `data` block.
        crops: the recipe's `objective.crops`.
        image_size: pixels per side of the global crops.
        paths: residual branches that drop path draws for (2 * blocks); 0: no drop path.
        drop_range: numbers are drawn below it.

    Batches hold `global_crops` (B, 2, 3, S, S) and `local_crops` (B, n, 3, s, s) uint8, and `drop` (B, 2 + n, paths)
    int32, drawn with the sample's own stream, so that no partition of the batch changes it.
    """

    def __init__(
        self, config: DataConfig, crops: CropsConfig, image_size: int, paths: int = 0, drop_range: int = 1 << 24
    ):
        self.config, self.crops, self.image_size = config, crops, image_size
        self.paths, self.drop_range = paths, drop_range

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        data = image_bytes(fields, source.config.image_keys)
        # JPEG's own halving stops at twice the crop: a global crop of 40 % of the area still has its pixels.
        image = decode_image(
            data, 2 * self.image_size if self.config.scaled_decoding else None, self.config.pixel_range
        )
        on_stage("decode")
        large, small = multi_crop(image, self.image_size, self.crops, rng)
        example = {"global_crops": large}
        if len(small):
            example["local_crops"] = small
        if self.paths:
            # By the sample's stream: dropped paths are the same whatever rank the sample lands on.
            example["drop"] = rng.integers(0, self.drop_range, (len(large) + len(small), self.paths), dtype=np.int32)
        on_stage("augment")
        return example

    def stack(self, examples: Any) -> dict[str, Tensor]:
        return {key: torch.from_numpy(np.stack([e[key] for e in examples])) for key in examples[0]}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        return as_samples(batch["global_crops"][:count, 0])
