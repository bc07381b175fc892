"""Slots of scenes by drawing views, those that were shown and others (Singh et al. 2024, Section 3.2; Sajjadi et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import nn

from sparo_train.core.config import Frozen, field
from sparo_train.core.contracts import Batch, Footprint, Loss, Objective, Progress
from sparo_train.core.errors import DataError
from sparo_train.data.video.window import FramesConfig
from sparo_train.objectives.method import Method

from ..objectives.collapse import SlotCollapseConfig, mask_statistics
from .rays import Rays, camera_rays
from .scene_model import SceneModel, SceneModelConfig, posed_views
from .view_examples import ViewExamples, ViewsConfig

_BATCH_KEYS = ("shown", "shown_poses", "shown_lenses", "colours", "poses", "lenses", "pixels", "offsets", "noise")


class NovelViewsConfig(Frozen):
    kind: Literal["novel_views"] = field("novel_views", "a row of sparo.methods")
    model: SceneModelConfig = field(SceneModelConfig(), "encoder of views, slots and decoder of rays")
    views: ViewsConfig = field(ViewsConfig(), "which cameras are shown, and which rays are drawn")
    frames: FramesConfig = field(FramesConfig(), "which times of an episode a sample is; count: 1 of still scenes")
    collapse: SlotCollapseConfig = field(SlotCollapseConfig(), "when a collapse is warned of")

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if self.views.rays > self.model.image_size**2:
            raise ValueError(
                f"views.rays={self.views.rays}: a view of model.image_size={self.model.image_size} has {self.model.image_size**2} pixels"
            )
        return self


class NovelViews(Objective):
    """Batches hold what `ViewExamples` makes."""

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
                raise DataError(f"objective {self.config.kind}: the batch has no {key!r} (it has {', '.join(batch)})")
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
        # Of each scene one view of one time; its rays are no picture, so where borders run is not asked.
        first = rendering.shares[..., :slots].view(b, times, views, count, slots)[:, 0, 0]
        collapse_metrics = mask_statistics(first.transpose(1, 2)[..., None])
        del collapse_metrics["mask_fixity"]
        return Loss(squared_error.mean(), {**metrics, **collapse_metrics})

    def rays(self, batch: Batch) -> Rays:
        """The rays that are drawn, each time's together: (B * T, W * R, …)."""
        side = self.config.model.image_size
        at = batch["pixels"].long()
        # Through the middle of a pixel: as evaluation draws it.
        columns, rows = (at % side).float() + 0.5, (at // side).float() + 0.5
        origins, directions = camera_rays(batch["poses"], batch["lenses"], columns, rows)
        # Every time's rays together: slots of a time draw them all.
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
        with torch.device("meta"):  # sizes alone
            each = m.decoder.build(m.grouping.width).numbers(slots)
        # A decoder that takes turns keeps one of them.
        written = times * v.context * m.encoder.cost(m.image_size) + min(
            rays * each, m.decoder.max_activations // batch
        )
        tokens = times * v.context * m.encoder.side(m.image_size) ** 2
        return Footprint({"views": tokens, "rays": rays}, [], times * slots * m.grouping.width, 0, written)


def _examples(config: Any, data: Any) -> ViewExamples:
    m = config.model
    return ViewExamples(data, m.image_size, m.noise, config.views, config.frames, m.bounds)


def _whole_views(run: Any) -> None:
    """Raise `ValueError` where views would be cropped or mirrored, and their cameras would not."""
    if run.data.crop_scale != (1.0, 1.0) or run.data.hflip:
        raise ValueError(
            "data.crop_scale, data.hflip: a view that is cropped or mirrored is not what its camera sees; set data.crop_scale: [1.0, 1.0] and data.hflip: 0"
        )


METHOD = Method(NovelViewsConfig, NovelViews, _examples, _whole_views, loss_keys=("views",))
