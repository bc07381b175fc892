"""Slots of scenes by rendering context and held-out views (Singh et al. 2024, Section 3.2; Sajjadi et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.disk.metrics import Sample
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.read.loader import Examples, OnStage, as_samples, ignore_stage
from sparo_train.data.sources.base import DataConfig, Source
from sparo_train.data.video.cameras import cut_lens
from sparo_train.data.video.episode import FramesConfig
from sparo_train.data.video.views import MultiViewScene
from sparo_train.objectives.method import Method, RecipeBlocks

from ..objectives.collapse import SlotCollapseConfig, mask_statistics
from ..video.clip_examples import FrameTransform
from .rays import Bounds, Rays, camera_rays, common_point
from .scene_model import SceneModel, SceneModelConfig, posed_views


class ViewsConfig(Frozen):
    """Numbers of context views, which are encoded, and of held-out views; both may be rendered."""

    context: int = field(3, "Number of context views, from which slots are computed.", gt=0, le=10_000)
    held_out: int = field(
        1,
        "Number of held-out views, which are rendered but not encoded. If a scene has more than context + held_out "
        "cameras, that many are chosen at random.",
        ge=0,
        le=10_000,
    )
    targets: Literal["all", "held_out"] = field(
        "all",
        "Views that are rendered. all: context views, too (PSB); held_out: only views that are not context (OSRT).",
    )
    rays: int = field(128, "Rays that are rendered per view and time step.", gt=0)

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if not self.num_target_views:
            raise ValueError("targets=held_out: held_out=0 leaves no view to render. Set targets: all.")
        return self

    @property
    def count(self) -> int:
        """Return the number of views of a sample."""
        return self.context + self.held_out

    @property
    def num_target_views(self) -> int:
        """Return the number of views whose rays are rendered."""
        return self.count if self.targets == "all" else self.held_out


class ViewExamples(Examples):
    """Posed views and rays of T times, V context views and W target views with R rays each; context views come first among targets.

        shown (B, T, V, 3, S, S) uint8    shown_poses (B, T, V, 4, 4), shown_lenses (B, T, V, 4)    noise (B, K, D)
        colours (B, T, W, R, 3) uint8     poses (B, T, W, 4, 4), lenses (B, T, W, 4)    pixels (B, T, W, R) int32,
        offsets (B, T, W, R)

    Poses and all other arrays are fp32. Views are cropped as in evaluation, because a random crop would have to change
    the lenses.

    Args:
        bounds: range in which rays are sampled; None: everywhere.
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
            raise BadSampleError(f"fewer views than objective.views needs ({v.context} context, {v.held_out} held out)")
        check_scene_bounds(scene.bounds, self.bounds)
        times = self.frames.window(scene.frames, rng)
        camera_ids = rng.permutation(len(scene.views))[: v.count]  # context views come first
        pictures = [[scene.views[number].image(t) for number in camera_ids] for t in times]
        if len({picture.shape[:2] for row in pictures for picture in row}) > 1:
            raise BadSampleError("views have unequal sizes")
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
        # Equally many of every view and time, without repetition.
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
        """Raise `BadSampleError` if cameras (V, 4, 4) look at one point, and all of them are nearer or farther than rays are sampled."""
        if self.bounds is None:
            return
        eyes, ahead = poses[:, :3, 3], -poses[:, :3, 2]
        eye_to_focus = common_point(eyes, ahead) - eyes
        along = (eye_to_focus * ahead).sum(1)
        axis_distance = np.linalg.norm(eye_to_focus - along[:, None] * ahead, axis=1)
        # Axes that do not meet in front of the cameras do not show where objects are.
        if (
            len(eyes) < 2
            or np.ptp(eyes, axis=0).max() < 1e-6
            or (along <= 0).any()
            or axis_distance.max() > 0.1 * along.min()
        ):
            return
        if along.max() < self.bounds.near or along.min() > self.bounds.far:
            raise BadSampleError(
                "the cameras look at a point outside the range of distances in which rays are sampled "
                f"({_format_bounds(self.bounds)}). Give this range in the units of the cameras' poses"
            )

    def _check_box_intersection(self, poses: np.ndarray, lenses: np.ndarray) -> None:
        """Raise `BadSampleError` if all views miss the box, because a model would only learn the sky."""
        if self.bounds is None or self.bounds.box is None:
            return
        pose_tensor, lens_tensor = (torch.from_numpy(table.copy()) for table in (poses, lenses))
        if not self.bounds.intersects(pose_tensor, lens_tensor, self.image_size):
            raise BadSampleError(
                f"no ray of the target views meets the sampled box (decoder.box={self.bounds.box}, "
                f"decoder.near={self.bounds.near:g}). Give both in the units of the cameras' poses"
            )

    def stack(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.stack([one[name] for one in examples])) for name in examples[0]}

    def preview(self, batch: Mapping[str, Tensor], count: int) -> list[Sample]:
        """Return the first views."""
        return as_samples(batch["shown"][:count, 0, 0])


def check_scene_bounds(scene_bounds: tuple[float, float] | None, bounds: Bounds | None) -> None:
    """Raise `BadSampleError` if a scene's own range of distances differs from that of the rays, which would miss it."""
    if bounds is None or scene_bounds is None:
        return
    if scene_bounds[0] < bounds.near - 1e-6 or scene_bounds[1] > bounds.far + 1e-6:
        raise BadSampleError(
            "`near` and `far` in the sample's .json are outside the range of distances in which rays are sampled "
            f"({_format_bounds(bounds)})"
        )


def _format_bounds(bounds: Bounds) -> str:
    """Describe the bounds in the recipe's keys, without a scene's own values, because skipped samples are counted by reason."""
    return f"decoder.near={bounds.near:g}" + ("" if bounds.far == math.inf else f", decoder.far={bounds.far:g}")


_BATCH_KEYS = ("shown", "shown_poses", "shown_lenses", "colours", "poses", "lenses", "pixels", "offsets", "noise")


class NovelViewsConfig(Frozen):
    """Slots of several posed views that render other views (Singh et al. 2024; OSRT)."""

    kind: Literal["novel_views"] = field("novel_views", "Training method: an entry of sparo.methods.")
    model: SceneModelConfig = field(SceneModelConfig(), "Encoder of views, slots, and decoder of rays.")
    views: ViewsConfig = field(ViewsConfig(), "Numbers of context views, held-out views and rays per sample.")
    frames: FramesConfig = field(
        FramesConfig(), "Which time steps of an episode form a sample. For static scenes, set count=1."
    )
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "Thresholds of the warning that slots collapse.")

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if self.views.rays > self.model.image_size**2:
            raise ValueError(
                f"views.rays={self.views.rays}: must be at most {self.model.image_size**2}, the number of pixels of a "
                f"view at model.image_size={self.model.image_size}"
            )
        return self


class NovelViews(Objective):
    """Objective for batches of `ViewExamples`."""

    exact_inputs = True

    def __init__(self, config: NovelViewsConfig):
        super().__init__()
        self.config = config
        self.model = SceneModel(config.model)
        self._fraction_done = 0.0  # share of the steps

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        self._fraction_done = progress.step / max(progress.total_steps, 1)
        for key in _BATCH_KEYS:
            if key not in batch:
                raise DataError(f"objective {self.config.kind}: the batch has no {key!r}, got {', '.join(batch)}")
        posed = posed_views(batch["shown"], batch["shown_poses"], batch["shown_lenses"])
        _, rendering = self.model(posed, batch["noise"], self.rays(batch))
        b, times, views, count, _ = batch["colours"].shape
        target = batch["colours"].to(torch.float32) / 255
        squared_error = (rendering.colours.float().view(b, times, views, count, 3) - target).square()
        metrics = {"mse": squared_error.detach().mean()}
        v = self.config.views
        if v.targets == "all" and v.held_out:
            metrics["mse_shown"], metrics["mse_held_out"] = (
                part.detach().mean() for part in squared_error.split([v.context, v.held_out], dim=2)
            )
        slots = self.config.model.grouping.slots
        # One view of one time per scene; random rays form no picture, so borders of masks are not compared.
        first = rendering.shares[..., :slots].view(b, times, views, count, slots)[:, 0, 0]
        collapse_metrics = mask_statistics(first.transpose(1, 2)[..., None])
        del collapse_metrics["mask_fixity"]
        return Loss(squared_error.mean(), {**metrics, **collapse_metrics})

    def rays(self, batch: Batch) -> Rays:
        """Return the rays to render, those of each time together: (B * T, W * R, …)."""
        side = self.config.model.image_size
        at = batch["pixels"].long()
        # Through the centre of a pixel, as in evaluation.
        columns, rows = (at % side).float() + 0.5, (at // side).float() + 0.5
        origins, directions = camera_rays(batch["poses"], batch["lenses"], columns, rows)
        # Rays of every time together, because they are rendered from the slots of that time.
        flat = [table.flatten(2, 3).flatten(0, 1) for table in (origins, directions, batch["offsets"])]
        return Rays(*flat)

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        return self.config.collapse.check_health(facts, self._fraction_done)

    def shard_units(self) -> Sequence[nn.Module]:
        tower = self.model.tower
        return [tower.encoder, *tower.grouping.units(), self.model.decoder]

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.model.tower.grouping.checkpointed = enable

    def footprint(self, batch: int, world_batch: int) -> Footprint:
        m, v, times = self.config.model, self.config.views, self.config.frames.count
        rays, slots = times * v.num_target_views * v.rays, m.grouping.slots
        with torch.device("meta"):  # only sizes
            each = m.decoder.build(m.grouping.width).numbers(slots)
        # A decoder that processes rays in chunks keeps one chunk.
        written = times * v.context * m.encoder.cost(m.image_size) + min(
            rays * each, m.decoder.max_activations // batch
        )
        tokens = times * v.context * m.encoder.side(m.image_size) ** 2
        return Footprint({"views": tokens, "rays": rays}, [], times * slots * m.grouping.width, 0, written)


def _examples(config: Any, data: Any) -> ViewExamples:
    m = config.model
    return ViewExamples(data, m.image_size, m.noise, config.views, config.frames, m.bounds)


def _whole_views(recipe: RecipeBlocks[NovelViewsConfig]) -> None:
    """Raise `ValueError` if views would be cropped or mirrored without their cameras."""
    if recipe.data.crop_scale != (1.0, 1.0) or recipe.data.hflip:
        raise ValueError(
            "data.crop_scale, data.hflip: a cropped or mirrored view does not match its camera. Set data.crop_scale: [1.0, 1.0] and data.hflip: 0."
        )


METHOD = Method(NovelViewsConfig, NovelViews, _examples, _whole_views, loss_keys=("views",))
