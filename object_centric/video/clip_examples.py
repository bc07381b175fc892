"""What slot models of videos train on: clips, cut and mirrored alike in all that is taken of them, and what their slots begin from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparo_train.core.disk.metrics import Sample
from sparo_train.core.errors import BadSampleError
from sparo_train.data.read.loader import Examples, OnStage, as_samples, ignore_stage
from sparo_train.data.read.sources import DataConfig, Source
from sparo_train.data.video.episode import Episode
from sparo_train.data.video.window import FramesConfig

from .frame_transforms import FrameTransform, flow_colours
from .video_tower import TimedTowerConfig


class ClipExamples(Examples):
    """`video` (B, T, 3, S, S) uint8 and `noise` (B, K, D) fp32. Which frames, which crop, and the noise are the visit's own draw.

    As far as they are asked for: `flow` (B, T, 3, S, S) uint8, where points of a frame were one frame of the episode before, as
    colours; `depth` (B, T, 1, S, S) fp32, log(1 + depth); `hint` (B, S, S) uint8, an object's number per pixel of the first frame.
    Clips that are not cropped at random (`crop_scale: [1, 1]`) are cut as evaluation cuts them, also where they are not square.

    Args:
        planes: of `flow`, `depth`, those that are drawn.
    """

    def __init__(self, config: DataConfig, model: TimedTowerConfig, frames: FramesConfig, planes: Sequence[str] = ()):
        self.config, self.image_size, self.noise, self.frames = config, model.image_size, model.noise, frames
        self.planes, self.num_hint_slots = planes, model.grouping.slots if model.hint is not None else 0

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        c = self.config
        episode = Episode(fields, source.config.image_keys, c.pixel_range)
        # Frames first: whatever else is drawn then comes from the same stream in the same order.
        times = self.frames.window(len(episode), rng)
        pictures = [episode.image(t) for t in times]
        planes = {"flow": episode.flow, "depth": episode.depth}
        plane_frames = {name: [planes[name](t) for t in times] for name in self.planes}
        labels = [episode.labels(times[0])] if self.num_hint_slots else []
        # Of all planes at once: a mask of another size than its picture would be cut elsewhere.
        if (
            len(
                {
                    table.shape[:2]
                    for table in (*pictures, *labels, *(t for tables in plane_frames.values() for t in tables))
                }
            )
            > 1
        ):
            raise BadSampleError("frames of unequal size")
        on_stage("decode")
        height, width = pictures[0].shape[:2]
        cut = FrameTransform.sample(self.image_size, (width, height), c.crop_scale, c.hflip, rng)
        example = {"video": np.stack([cut.picture(picture) for picture in pictures]).transpose(0, 3, 1, 2)}
        example["noise"] = rng.standard_normal(self.noise, dtype=np.float32)
        if "flow" in plane_frames:
            example["flow"] = np.stack([flow_colours(cut.flow(t)) for t in plane_frames["flow"]]).transpose(0, 3, 1, 2)
        if "depth" in plane_frames:
            # Depths of metres and of a background far away: the logarithm keeps both in sight.
            example["depth"] = np.log1p(np.stack([cut.depth(t) for t in plane_frames["depth"]])).astype(np.float32)[
                :, None
            ]
        if labels:
            example["hint"] = hint_labels(cut.labels(labels[0]), self.num_hint_slots)
        on_stage("augment")
        return {name: np.ascontiguousarray(table) for name, table in example.items()}

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.stack([one[name] for one in examples])) for name in examples[0]}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """The first frames."""
        return as_samples(batch["video"][:count, 0])


def hint_labels(labels: np.ndarray, slots: int) -> np.ndarray:
    """A first frame's labels as a hint, uint8. Raises `BadSampleError` where an object's number is no slot's."""
    if labels.min() < 0 or labels.max() >= min(slots, 256):
        raise BadSampleError("more objects than slots")
    return labels.astype(np.uint8)
