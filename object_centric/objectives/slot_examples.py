"""What slot models train on: images, and what their slots begin from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparo_train.data.examples.image_transforms import eval_pixels, train_pixels
from sparo_train.data.examples.samples import decode_image, image_bytes
from sparo_train.data.read.loader import Examples, OnStage, ignore_stage
from sparo_train.data.read.sources import DataConfig, Source

from .slot_tower import SlotTowerConfig


class SlotExamples(Examples):
    """Images, and the noise that their slots begin from, drawn with the sample's own stream.

    Images that are not cropped at random (`crop_scale: [1, 1]`) are cut as evaluation cuts them, also where they are not square.
    """

    def __init__(self, config: DataConfig, model: SlotTowerConfig):
        self.config, self.image_size, self.noise = config, model.image_size, model.noise

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        c, size = self.config, self.image_size
        image = decode_image(
            image_bytes(fields, source.config.image_keys), 2 * size if c.scaled_decoding else None, c.pixel_range
        )
        on_stage("decode")
        if c.crop_scale == (1.0, 1.0):
            pixels = eval_pixels(image, size)
            pixels = pixels[:, ::-1] if c.hflip > 0 and rng.random() < c.hflip else pixels
        else:
            pixels = train_pixels(image, size, c.crop_scale, c.hflip, rng)
        noise = rng.standard_normal(self.noise, dtype=np.float32)
        on_stage("augment")
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), noise

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        names = ("image", "noise")
        return {
            name: torch.from_numpy(np.stack(column))
            for name, column in zip(names, zip(*examples, strict=True), strict=True)
        }
