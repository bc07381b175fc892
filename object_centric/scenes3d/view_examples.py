"""What models of scenes train on: which cameras are shown and which held out, and which rays are drawn, all by the visit's own draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from sparo_train.core.config import Frozen, field
from sparo_train.core.disk.metric_loggers import Sample
from sparo_train.core.errors import BadSampleError
from sparo_train.data.read.loader import Examples, OnStage, as_samples, ignore_stage
from sparo_train.data.read.sources import DataConfig, Source
from sparo_train.data.video.cameras import cut_lens
from sparo_train.data.video.views import MultiViewScene
from sparo_train.data.video.window import FramesConfig

from ..video.frame_transforms import FrameTransform
from .rays import Bounds, common_point


class ViewsConfig(Frozen):
    """Of a scene's cameras some are shown; what they and the others see is drawn."""

    context: int = field(3, "views that slots are made of", gt=0, le=10_000)
    held_out: int = field(
        1, "views that are drawn and not shown; a scene with more cameras has some drawn", ge=0, le=10_000
    )
    targets: Literal["all", "held_out"] = field(
        "all", "which of them are drawn: shown ones, too (PSB), or those held out alone (OSRT)"
    )
    rays: int = field(128, "that are drawn of each view and time", gt=0)

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.num_target_views:
            raise ValueError("targets=held_out: held_out=0 leaves nothing to draw; set targets: all")
        return self

    @property
    def count(self) -> int:
        """Views of a sample."""
        return self.context + self.held_out

    @property
    def num_target_views(self) -> int:
        """Views of which rays are drawn."""
        return self.count if self.targets == "all" else self.held_out


class ViewExamples(Examples):
    """Posed views and rays of T times, V shown views and W drawn ones, of which R rays each; the shown stand first among the drawn.

        shown (B, T, V, 3, S, S) uint8    shown_poses (B, T, V, 4, 4), shown_lenses (B, T, V, 4)    noise (B, K, D)
        colours (B, T, W, R, 3) uint8     poses (B, T, W, 4, 4), lenses (B, T, W, 4)    pixels (B, T, W, R) int32, offsets (B, T, W, R)

    Poses and all else are fp32. Views are cut as evaluation cuts them; a random crop would have to be told to lenses, and nobody does that.

    Args:
        bounds: where rays are looked at; None: everywhere.
    """

    def __init__(
        self,
        config: DataConfig,
        image_size: int,
        noise: tuple[int, int],
        views: ViewsConfig,
        frames: FramesConfig,
        bounds: Bounds | None,
    ):
        self.config, self.image_size, self.noise = config, image_size, noise
        self.views, self.frames, self.bounds = views, frames, bounds

    def prepare(
        self, fields: dict[str, bytes], source: Source, rng: np.random.Generator, on_stage: OnStage = ignore_stage
    ) -> Any:
        v, size = self.views, self.image_size
        scene = MultiViewScene(fields, source.config.image_keys, self.config.pixel_range)
        if len(scene.views) < v.count:
            raise BadSampleError(f"fewer views than objective.views takes ({v.context} shown, {v.held_out} held out)")
        check_scene_bounds(scene.bounds, self.bounds)
        times = self.frames.window(scene.frames, rng)
        camera_ids = rng.permutation(len(scene.views))[: v.count]  # the first of them are shown
        pictures = [[scene.views[number].image(t) for number in camera_ids] for t in times]
        if len({picture.shape[:2] for row in pictures for picture in row}) > 1:
            raise BadSampleError("views of unequal size")
        on_stage("decode")
        height, width = pictures[0][0].shape[:2]
        cut = FrameTransform(size)
        pixels = np.stack([np.stack([cut.picture(picture) for picture in row]) for row in pictures])
        lens = [cut_lens(scene.lens(number, width, height), width, height, size) for number in camera_ids]
        poses = np.stack([[scene.pose(number, t) for number in camera_ids] for t in times]).astype(np.float32)
        lenses = np.broadcast_to(np.asarray(lens, np.float32), (len(times), v.count, 4))
        target_slice = slice(v.count - v.num_target_views, v.count)
        if scene.bounds is None:
            self._check_focus_point(poses[0].astype(np.float64))
        self._check_box_intersection(poses[:, target_slice], lenses[:, target_slice])
        shape, most = (len(times), v.num_target_views), size * size
        # As many of every view and time, none of them twice.
        at = np.stack([rng.choice(most, v.rays, replace=False, shuffle=False) for _ in range(shape[0] * shape[1])])
        at = at.reshape(*shape, v.rays)
        colours = np.take_along_axis(pixels[:, target_slice].reshape(*shape, most, 3), at[..., None], axis=2)
        example = {
            "shown": pixels[:, : v.context].transpose(0, 1, 4, 2, 3),
            "shown_poses": poses[:, : v.context],
            "shown_lenses": lenses[:, : v.context],
            "colours": colours,
            "poses": poses[:, target_slice],
            "lenses": lenses[:, target_slice],
            "pixels": at.astype(np.int32),
            "offsets": rng.random(at.shape, dtype=np.float32),
            "noise": rng.standard_normal(self.noise, dtype=np.float32),
        }
        on_stage("augment")
        return {name: np.ascontiguousarray(table) for name, table in example.items()}

    def _check_focus_point(self, poses: np.ndarray) -> None:
        """Raise `BadSampleError` where cameras (V, 4, 4) look at one point, and all of them nearer or farther than rays are looked at."""
        if self.bounds is None:
            return
        eyes, ahead = poses[:, :3, 3], -poses[:, :3, 2]
        eye_to_focus = common_point(eyes, ahead) - eyes
        along = (eye_to_focus * ahead).sum(1)
        axis_distance = np.linalg.norm(eye_to_focus - along[:, None] * ahead, axis=1)
        # Axes that do not meet before the cameras say nothing of where things are.
        if (
            len(eyes) < 2
            or np.ptp(eyes, axis=0).max() < 1e-6
            or (along <= 0).any()
            or axis_distance.max() > 0.1 * along.min()
        ):
            return
        if along.max() < self.bounds.near or along.min() > self.bounds.far:
            raise BadSampleError(
                f"its cameras look at a point nearer or farther than its rays are looked at ({_format_bounds(self.bounds)}); "
                "those are in the units of the cameras' poses"
            )

    def _check_box_intersection(self, poses: np.ndarray, lenses: np.ndarray) -> None:
        """Raise `BadSampleError` where views look past the box: of them a model would learn its sky, and nothing else."""
        if self.bounds is None or self.bounds.box is None:
            return
        pose_tensor, lens_tensor = (torch.from_numpy(table.copy()) for table in (poses, lenses))
        if not self.bounds.intersects(pose_tensor, lens_tensor, self.image_size):
            raise BadSampleError(
                f"no ray of its views meets the box that is looked at (decoder.box={self.bounds.box}, "
                f"decoder.near={self.bounds.near:g}); it is in the units of the cameras' poses"
            )

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.stack([one[name] for one in examples])) for name in examples[0]}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """The first views."""
        return as_samples(batch["shown"][:count, 0, 0])


def check_scene_bounds(scene_bounds: tuple[float, float] | None, bounds: Bounds | None) -> None:
    """Raise `BadSampleError` where a scene says that it is seen between other distances than rays are drawn: they would miss it."""
    if bounds is None or scene_bounds is None:
        return
    if scene_bounds[0] < bounds.near - 1e-6 or scene_bounds[1] > bounds.far + 1e-6:
        raise BadSampleError(
            f"seen nearer or farther than its rays are looked at ({_format_bounds(bounds)}); its json's near and far say where"
        )


def _format_bounds(bounds: Bounds) -> str:
    """In the recipe's words, without a scene's own numbers: skipped samples are counted by reason."""
    return f"decoder.near={bounds.near:g}" + ("" if bounds.far == math.inf else f", decoder.far={bounds.far:g}")
