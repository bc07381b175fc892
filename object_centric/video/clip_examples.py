"""Examples for slot models of videos: clips whose frames, masks, flow and depth have the same crop and flip, and noise for initial slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sparo_train.core.disk.metrics import Sample
from sparo_train.core.errors import BadSampleError
from sparo_train.data.examples.image_transforms import Crop, eval_pixels, random_resized_crop_box, resized_crop
from sparo_train.data.read.loader import Examples, OnStage, as_samples, ignore_stage
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.data.video.episode import Episode, FramesConfig

from .video_tower import TimedTowerConfig


@dataclass(frozen=True)
class FrameTransform:
    """Crop to a square of `size` pixels per side.

    Args:
        box: crop box; None: the centre, as in evaluation.
        flip: mirror.
    """

    size: int
    box: Crop | None = None
    flip: bool = False

    @classmethod
    def sample(
        cls, size: int, frame: tuple[int, int], scale: tuple[float, float], hflip: float, rng: np.random.Generator
    ) -> FrameTransform:
        """Sample one transform for all frames (width, height) of a clip: RandomResizedCrop's box, or the centre if `scale` is (1, 1)."""
        box = None if scale == (1.0, 1.0) else random_resized_crop_box(frame, scale, rng)
        return cls(size, box, hflip > 0 and bool(rng.random() < hflip))

    def picture(self, frame: np.ndarray) -> np.ndarray:
        """Transform (H, W, 3) uint8 to (S, S, 3)."""
        return self._maybe_flip(self._resize(Image.fromarray(frame), Image.Resampling.BICUBIC))

    def labels(self, plane: np.ndarray) -> np.ndarray:
        """Transform (H, W) labels to (S, S) int32, by nearest neighbours, because labels cannot be averaged."""
        return self._maybe_flip(self._resize(Image.fromarray(plane.astype(np.int32)), Image.Resampling.NEAREST))

    def depth(self, plane: np.ndarray) -> np.ndarray:
        """Transform (H, W) fp32 to (S, S)."""
        return self._maybe_flip(self._resize(Image.fromarray(plane), Image.Resampling.BILINEAR))

    def flow(self, plane: np.ndarray) -> np.ndarray:
        """Transform (H, W, 2), rows and columns in pixels, to (S, S, 2) in pixels of the crop."""
        height, width = plane.shape[:2]
        if self.box is None:
            tall, wide = self.size / min(height, width), self.size / min(height, width)
        else:
            tall, wide = self.size / self.box.height, self.size / self.box.width
        rows, columns = self.depth(plane[..., 0].copy()), self.depth(plane[..., 1].copy())
        # Mirroring changes the sign of columns only.
        return np.stack([rows * tall, columns * (-wide if self.flip else wide)], axis=-1)

    def _resize(self, image: Image.Image, filter: Image.Resampling) -> np.ndarray:
        if self.box is None:
            return eval_pixels(image, self.size, filter=filter)
        return resized_crop(image, self.box, self.size, filter)

    def _maybe_flip(self, array: np.ndarray) -> np.ndarray:
        return array[:, ::-1] if self.flip else array


def flow_colours(flow: np.ndarray) -> np.ndarray:
    """Show flow (S, S, 2) in pixels as an image (S, S, 3) uint8: hue for direction, saturation for length, white for no motion.

    As slot-attention-video's `flow_tensor_to_rgb_tensor`: saturated from a fiftieth of the image's diagonal on.
    """
    first, second = flow[..., 0].astype(np.float32), flow[..., 1].astype(np.float32)
    hue = (np.arctan2(second, first) / np.pi + 1) / 2
    length = np.hypot(first, second) * np.float32(50 / np.hypot(*flow.shape[:2]))
    # HSV with value one: a colour is white minus its distance in hue (red, green, blue at 5, 3, 1 sixths).
    hue_phase = (np.array([5, 3, 1], np.float32) + 6 * hue[..., None]) % 6
    left = 1 - np.clip(length, 0, 1)[..., None] * np.clip(np.minimum(hue_phase, 4 - hue_phase), 0, 1)
    return (left * 255 + 0.5).astype(np.uint8)


class ClipExamples(Examples):
    """Clips: `video` (B, T, 3, S, S) uint8 and `noise` (B, K, D) fp32. The frames, the crop and the noise are random per visit.

    If requested: `flow` (B, T, 3, S, S) uint8, the displacement of points since the previous frame of the episode, as
    colours; `depth` (B, T, 1, S, S) fp32, log(1 + depth); `hint` (B, S, S) uint8, object numbers in the first frame.
    Clips without random crops (`crop_scale: [1, 1]`) are cropped as in evaluation, even if they are not square.

    Args:
        planes: the targets among `flow`, `depth`.
    """

    def __init__(self, config: DataConfig, model: TimedTowerConfig, frames: FramesConfig, planes: Sequence[str] = ()):
        self.config, self.image_size, self.noise, self.frames = config, model.image_size, model.noise, frames
        self.planes, self.num_hint_slots = planes, model.grouping.slots if model.hint is not None else 0

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        c = self.config
        episode = Episode(fields, source.config.image_keys, c.pixel_range)
        # Frames first, so that later random numbers come from the same stream in the same order.
        times = self.frames.window(len(episode), rng)
        pictures = [episode.image(t) for t in times]
        planes = {"flow": episode.flow, "depth": episode.depth}
        plane_frames = {name: [planes[name](t) for t in times] for name in self.planes}
        labels = [episode.labels(times[0])] if self.num_hint_slots else []
        # Compare sizes of all planes, because a mask of another size would be cropped elsewhere.
        if (
            len(
                {
                    table.shape[:2]
                    for table in (*pictures, *labels, *(t for tables in plane_frames.values() for t in tables))
                }
            )
            > 1
        ):
            raise BadSampleError("frames have unequal sizes")
        on_stage("decode")
        height, width = pictures[0].shape[:2]
        cut = FrameTransform.sample(self.image_size, (width, height), c.crop_scale, c.hflip, rng)
        example = {"video": np.stack([cut.picture(picture) for picture in pictures]).transpose(0, 3, 1, 2)}
        example["noise"] = rng.standard_normal(self.noise, dtype=np.float32)
        if "flow" in plane_frames:
            example["flow"] = np.stack([flow_colours(cut.flow(t)) for t in plane_frames["flow"]]).transpose(0, 3, 1, 2)
        if "depth" in plane_frames:
            # Depths of metres and of a distant background: the logarithm keeps both in range.
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
        """Return the first frames."""
        return as_samples(batch["video"][:count, 0])


def hint_labels(labels: np.ndarray, slots: int) -> np.ndarray:
    """Return a first frame's labels as a hint, uint8; void pixels (255) are background. Raises `BadSampleError` if an object number exceeds the slots."""
    if slots < 256:
        labels = np.where(labels == 255, 0, labels)
    if labels.min() < 0 or labels.max() >= min(slots, 256):
        raise BadSampleError("an object's number is outside the numbers of the slots (0 to slots - 1)")
    return labels.astype(np.uint8)
