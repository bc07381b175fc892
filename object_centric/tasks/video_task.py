"""`task: video_masks`: how well a slot model's masks follow the objects of videos, and how accurate its frames are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from pydantic import model_validator
from torch import Tensor

from evals.encoders.capabilities import ClipsEncoder, ViewsEncoder
from evals.encoders.encoder import Encoder
from evals.encoders.pixels import Pixels
from evals.feature_store.feature_table import View
from evals.sets.base import EvalSet
from evals.sets.task_config import TaskConfig
from evals.sets.view_set import ClipSet
from evals.suite.scoring import Scoring, attach_data_info
from evals.suite.task import Task
from evals.tasks.objects import clip_segmentation
from evals.tasks.result import Result
from sparo_train.core.config import field
from sparo_train.core.errors import DataError

from .mask_task import transform_mask

_FRAME_METRICS = ("psnr", "mse")  # scores that need no object


class VideoMasksTaskConfig(TaskConfig):
    """Episodes in the layout of evaluation sets (`sparo data movi-like`, `sparo data convert --videos`)."""

    task: Literal["video_masks"] = field("video_masks", "Kind of the task: an entry of sparo.tasks.")
    root: str = field(..., "Folder of the data set.", examples=["data/movi_a/clips"])
    split: str = field("test", "Split that is scored.")
    frames: int | None = field(
        None,
        "Use only this many frames of every episode, from its start. Default: all; episodes must then have equal lengths.",
        gt=0,
        examples=[6],
    )
    context_frames: int | None = field(
        None,
        "Number of frames from which the slots of a frame are computed: the frame itself and those directly "
        "before it. Default: for the parallel binder, the length of training clips; for recurrent slots, all "
        "frames so far.",
        gt=0,
        examples=[6],
    )
    first_frame: bool = field(True, "Include the first frame in scores.")
    generate_frames: bool = field(
        False, "For models that predict tokens (STEVE): generate frames from slots, for mse and psnr. Slow."
    )
    background: int | None = field(0, "Label of the background, which is not an object. null: all labels are objects.")
    ignore: int | None = field(255, "Label of pixels that are excluded from scores. null: none.")
    headline: Literal[
        "video_fg_ari",
        "video_fg_ari_savi",
        "image_fg_ari",
        "ari",
        "video_mbo",
        "image_mbo",
        "video_miou",
        "psnr",
        "mse",
    ] = field("video_fg_ari", "Metric that tables show.")
    limit: int | None = field(None, "Use only this many episodes, evenly spaced.", gt=0, examples=[100])
    workers: int = field(2, "Processes that decode frames.", ge=0, le=256)

    @model_validator(mode="after")
    def _check_frames(self) -> Self:
        if self.frames == 1 and not self.first_frame:
            raise ValueError("first_frame=false: frames=1 leaves no frame to score. Set frames to 2 or more.")
        return self


@dataclass(frozen=True)
class EveryFrame:
    """Transform of a clip's images to (T, S, S, 3), each as in `of`; `told`: the last image is labels, which become a fourth plane of all frames."""

    to_pixels: Pixels
    with_labels: bool = False

    def __call__(self, images: Any) -> np.ndarray:
        frames = np.stack([self.to_pixels(image) for image in (images[:-1] if self.with_labels else images)])
        if not self.with_labels:
            return frames
        plane = np.broadcast_to(self.to_pixels.labels(images[-1]).astype(np.uint8), frames.shape[:-1])
        return np.concatenate([frames, plane[..., None]], axis=-1)


def window_incompatibility(window: int | None, encoder: Encoder) -> str | None:
    """Return why this encoder does not support the task's number of context frames, or None."""
    if window is None or (isinstance(encoder, ClipsEncoder | ViewsEncoder) and encoder.windowed):
        return None
    return (
        f"context_frames={window}: applies only to models that process a clip at once; slots of this model depend on "
        "all earlier frames, or on one frame. Set context_frames: null."
    )


def open_clips(task: VideoMasksTaskConfig, num_hint_slots: int = 0) -> EvalSet:
    """Return the episodes of the task; for `num_hint_slots` see `ClipSet`. Raises `DataError` if they are missing."""
    clips = ClipSet(task.root, task.frames, task.split, num_hint_slots)
    return clips if task.limit is None else clips.limit_to(task.limit)


def run_video_masks(scoring: Scoring, task: VideoMasksTaskConfig) -> Result:
    """Return the scores of `evals/tasks/objects/clip_segmentation.py`, at the model's size; true masks are resized by nearest neighbours."""
    encoder = scoring.encoder
    assert isinstance(encoder, Encoder) and isinstance(encoder, ClipsEncoder)  # encoders with `clips`
    assert isinstance(encoder.transform, Pixels)  # encoders of clips have it
    source = open_clips(task, encoder.slots if encoder.conditional else 0)
    size, window = encoder.image_size, task.context_frames

    def encode(video: Tensor) -> Tensor:
        return encoder.clips(video, window, generated=task.generate_frames)

    # Name the effective value: by default, a binder sees as many times as in training, which its weights do not show.
    context_frames = window or encoder.trained_frames
    view_name = f"clips: {encoder.masks_are}, window {context_frames}" + (", drawn" if task.generate_frames else "")
    view = View(view_name, encode, measured=True)
    (features,) = scoring.features([source], task.workers, EveryFrame(encoder.transform, encoder.conditional), view)

    def score() -> Result:
        rows = (row.numpy() for block in features.blocks(64) for row in block)

        def clip(row: np.ndarray, true: np.ndarray) -> clip_segmentation.MaskedClip:
            masks = row[: -len(true)].reshape(len(true), size, size).astype(np.int64)
            errors = np.where(row[-len(true) :] < 0, np.nan, row[-len(true) :])
            return clip_segmentation.MaskedClip(
                np.stack([transform_mask(encoder, plane) for plane in true]), masks, errors
            )

        clips = (clip(row, np.asarray(fact)) for row, fact in zip(rows, features.facts, strict=True))
        pixels = task.generate_frames or "psnr" in encoder.frame_scores
        result = clip_segmentation.score(clips, task.background, task.ignore, task.first_frame, pixels)
        if task.headline not in result.metrics or not (result.n or task.headline in _FRAME_METRICS):
            raise DataError(
                f"{source.root}: {task.headline} cannot be computed for any episode. Label {task.background} counts as "
                "background. If that label is an object, correct the key `background`."
            )
        return result.with_headline(task.headline)

    frames = len(features.facts[0])
    options = {
        "mask_size": size,
        "resampling": "nearest",
        "masks": encoder.masks_are,
        "slots": encoder.slots,
        "frames": frames,
        "trained_frames": encoder.trained_frames,
        "window": window,
        "conditional": encoder.conditional,
    }
    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, options)


def _incompatibility(task: VideoMasksTaskConfig, encoder: Encoder) -> str | None:
    assert isinstance(encoder, ClipsEncoder)  # encoders with `clips`
    if task.generate_frames and not encoder.generates:
        return "generate_frames=true: applies to models that generate frames token by token. Remove it."
    if task.headline in _FRAME_METRICS and encoder.generates and not task.generate_frames:
        return f"headline={task.headline}: this model generates frames only if asked to. Set generate_frames: true, or headline: video_fg_ari."
    if task.headline in _FRAME_METRICS and task.headline not in encoder.frame_scores and not task.generate_frames:
        other = encoder.frame_scores[0] if encoder.frame_scores else "video_fg_ari"
        return f"headline={task.headline}: this model has no {'frames' if other != 'mse' else 'pixels'} to compare. Set headline: {other}."
    return window_incompatibility(task.context_frames, encoder)


VIDEO_MASKS = Task(
    VideoMasksTaskConfig,
    run_video_masks,
    lambda task: open_clips(task).check(),
    needs=("clips",),
    facts="clips",
    incompatibility=_incompatibility,
    pictures="object_centric.pictures.evaluated:draw_clips",
)
