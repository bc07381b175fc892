"""`task: view_masks`: accuracy of held-out views rendered from slots of context views, and of slots' masks over time and cameras."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import numpy as np
from torch import Tensor

from evals.encoders.capabilities import ViewsEncoder
from evals.encoders.encoder import Encoder
from evals.encoders.pixels import Pixels
from evals.feature_store.feature_table import View
from evals.sets.base import EvalSet
from evals.sets.task_config import TaskConfig
from evals.sets.view_set import ViewSet
from evals.suite.scoring import Scoring, attach_data_info
from evals.suite.task import Task
from evals.tasks.objects import view_scores
from evals.tasks.result import Result
from sparo_train.core.config import field
from sparo_train.core.errors import DataError

from .mask_task import transform_mask
from .scene_encoder import EveryView, row_parts
from .video_task import window_incompatibility


class ViewMasksTaskConfig(TaskConfig):
    """Scenes in the layout of evaluation sets (`sparo data scenes3d`)."""

    task: Literal["view_masks"] = field("view_masks", "Kind of the task: an entry of sparo.tasks.")
    root: str = field(..., "Folder of the data set.", examples=["data/scenes3d_simple/scenes"])
    split: str = field("test", "Split that is scored.")
    frames: int | None = field(
        None,
        "Use only this many time steps of every episode, from its start. Default: all; episodes must then have equal lengths.",
        gt=0,
        examples=[6],
    )
    views: int | None = field(None, "Use only this many cameras, the first ones. Default: all.", gt=1, examples=[5])
    num_context_views: int | None = field(
        None,
        "Compute slots from this many cameras, the first ones. Default: as many as in training.",
        gt=0,
        examples=[3],
    )
    context_frames: int | None = field(
        None,
        "Number of time steps from which the slots of a step are computed: the step itself and those directly before it. Default: "
        "the clip length of training.",
        gt=0,
        examples=[6],
    )
    background: int | None = field(0, "Label of the background, which is not an object. null: all labels are objects.")
    ignore: int | None = field(255, "Label of pixels that are excluded from scores of masks. null: none.")
    far: float = field(
        50.0,
        "Score depth only at pixels whose true depth is below this value, in world units. This excludes the sky.",
        gt=0,
    )
    headline: Literal[
        "psnr_held_out", "psnr_shown", "ssim_held_out", "image_fg_ari", "video_fg_ari", "camera_fg_ari", "scene_fg_ari", "ari", "depth_error"
    ] = field("psnr_held_out", "Metric that tables show.")  # fmt: skip
    limit: int | None = field(None, "Use only this many episodes, evenly spaced.", gt=0, examples=[100])
    workers: int = field(2, "Processes that decode views.", ge=0, le=256)


def open_views(task: ViewMasksTaskConfig) -> EvalSet:
    """Return the scenes of the task. Raises `DataError` if they are missing."""
    scenes = ViewSet(task.root, task.frames, task.views, task.split)
    return scenes if task.limit is None else scenes.limit_to(task.limit)


def run_view_masks(scoring: Scoring, task: ViewMasksTaskConfig) -> Result:
    """Return the scores of `evals/tasks/objects/view_scores.py`, at the model's size; true masks and depth are resized by nearest neighbours.

    Raises:
        DataError: all views are context views, or no scene has the headline.
    """
    encoder = scoring.encoder
    assert isinstance(encoder, Encoder) and isinstance(encoder, ViewsEncoder)  # encoders with `views`
    assert isinstance(encoder.transform, Pixels)
    source, size, window = open_views(task), encoder.image_size, task.context_frames
    num_context_views = task.num_context_views or encoder.trained_views
    views = (source if source.part_of is None else source.part_of).views  # type: ignore[attr-defined]
    if num_context_views >= views:
        raise DataError(
            f"{source.root}: {num_context_views} of {views} views are context views, which leaves none to score. Reduce num_context_views."
        )

    def encode(posed: Tensor) -> Tensor:
        return encoder.scenes(posed, num_context_views, window).cpu()

    # Name the effective value: by default, a binder sees as many times as in training, which its weights do not show.
    view = View(f"scenes, {num_context_views} shown, window {window or encoder.trained_frames}", encode, measured=True)
    (features,) = scoring.features([source], task.workers, EveryView(encoder.transform), view)

    def score() -> Result:
        rows = (row.numpy() for block in features.blocks(16) for row in block)
        clips = (_clip(encoder, row, np.asarray(fact)) for row, fact in zip(rows, features.facts, strict=True))
        result = view_scores.score(clips, num_context_views, task.far, task.background, encoder.ends, task.ignore)
        if task.headline not in result.metrics:
            raise DataError(
                f"{source.root}: {task.headline} cannot be computed for any scene. Set headline to another score."
            )
        return result.with_headline(task.headline)

    shape = np.asarray(features.facts[0]).shape
    options = {
        "mask_size": size,
        "resampling": "nearest",
        "slots": encoder.slots,
        "frames": shape[1],
        "trained_frames": encoder.trained_frames,
        "views": shape[2],
        "shown": num_context_views,
        "trained_shown": encoder.trained_views,
        "window": window,
        "far": task.far,
    }
    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, options)


def _clip(encoder: Encoder, row: np.ndarray, fact: np.ndarray) -> view_scores.ViewedClip:
    """Return a stored row and (2, T, V, H, W) of true labels and depths."""
    (errors, ssim, nearest, mean), labels, depth = row_parts(row, fact.shape[1:3], encoder.image_size)
    true_masks = np.stack([np.stack([transform_mask(encoder, plane) for plane in views]) for views in fact[0]])
    true_depth = np.stack([np.stack([_transform_depth(encoder, plane) for plane in views]) for views in fact[1]])
    predicted_depth = np.full(true_depth.shape, np.nan, np.float32) if depth is None else depth
    return view_scores.ViewedClip(true_masks, labels, errors, ssim, nearest, mean, predicted_depth, true_depth)


def _transform_depth(encoder: Encoder, plane: np.ndarray) -> np.ndarray:
    """Resize and crop a depth map like labels, because there is nothing between an edge and its background."""
    # Pixel indices, resized by nearest neighbours, so that depth comes from the same pixels as labels.
    numbers = np.arange(plane.size, dtype=np.int32).reshape(plane.shape)
    return plane.reshape(-1)[transform_mask(encoder, numbers)]


def _incompatibility(task: ViewMasksTaskConfig, encoder: Encoder) -> str | None:
    assert isinstance(encoder, ViewsEncoder)  # encoders with `views`
    if task.headline == "depth_error" and not encoder.predicts_depth:
        return "headline=depth_error: the decoder of this model has no depth (nerf has). Set psnr_held_out."
    num_context_views, views = task.num_context_views or encoder.trained_views, task.views
    with suppress(DataError):  # the check of the set reports missing data
        views = views or ViewSet(task.root, task.frames, None, task.split).views
    if views is not None and num_context_views >= views:
        return f"views={views}: {num_context_views} of them are context views, which leaves none to score. Reduce num_context_views."
    return window_incompatibility(task.context_frames, encoder)


VIEW_MASKS = Task(
    ViewMasksTaskConfig,
    run_view_masks,
    lambda task: open_views(task).check(),
    needs=("views",),
    facts="views",
    incompatibility=_incompatibility,
    pictures="object_centric.pictures.evaluated:draw_views",
)
