"""What slot models of videos train on: clips, cropped and mirrored alike in all of their frames, and what their slots begin from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sparo_train.core.disk.mirrors import Sample
from sparo_train.core.errors import BadSampleError
from sparo_train.data.clips.episode import Episode
from sparo_train.data.clips.window import FramesConfig
from sparo_train.data.examples.transforms import eval_pixels, random_resized_crop_box, resized_crop
from sparo_train.data.read.loader import Examples, OnStage, as_samples, ignore_stage
from sparo_train.data.read.sources import DataConfig, Source

from ..objectives.slot_tower import SlotTowerConfig


class ClipExamples(Examples):
    """`video` (B, T, 3, S, S) uint8 and `noise` (B, K, D) fp32. Which frames, which crop, and the noise are the visit's own draw.

    Clips that are not cropped at random (`crop_scale: [1, 1]`) are cut as evaluation cuts them, also where they are not square.
    """

    def __init__(self, config: DataConfig, model: SlotTowerConfig, frames: FramesConfig):
        self.config, self.image_size, self.noise, self.frames = config, model.image_size, model.noise, frames

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        c, size = self.config, self.image_size
        episode = Episode(fields, source.config.image_keys)
        pictures = [episode.image(t) for t in self.frames.window(len(episode), rng)]
        if len({picture.shape for picture in pictures}) > 1:
            raise BadSampleError("frames of unequal size")
        on_stage("decode")
        images = [Image.fromarray(picture) for picture in pictures]
        if c.crop_scale == (1.0, 1.0):
            video = np.stack([eval_pixels(image, size) for image in images])
        else:
            box = random_resized_crop_box(images[0].size, c.crop_scale, rng)
            video = np.stack([resized_crop(image, box, size) for image in images])
        if c.hflip > 0 and rng.random() < c.hflip:
            video = video[:, :, ::-1]
        noise = rng.standard_normal(self.noise, dtype=np.float32)
        on_stage("augment")
        return np.ascontiguousarray(video.transpose(0, 3, 1, 2)), noise

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        names = ("video", "noise")
        return {
            name: torch.from_numpy(np.stack(column))
            for name, column in zip(names, zip(*examples, strict=True), strict=True)
        }

    def shown(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """The first frames."""
        return as_samples(batch["video"][:count, 0])
