"""Pictures of a task's data for the evaluations of a run: masks of images, of clips, of posed views. None if the encoder has no masks."""

from __future__ import annotations

from typing import Any

from evals.encoders.encoder import Encoder
from evals.sets.base import EvalSet
from evals.suite.task import TaskPictures

from ..tasks.cropped_set import open_masks
from ..tasks.mask_task import MasksTaskConfig
from ..tasks.scene_encoder import SceneEncoder
from ..tasks.slot_encoder import MaskingEncoder
from ..tasks.video_encoder import TimedEncoder
from ..tasks.video_task import VideoMasksTaskConfig, open_clips
from ..tasks.view_task import ViewMasksTaskConfig, open_views
from .panels import ClipPanel, Panel, clip_animation, clip_sheet, panels
from .scene_sheets import read_sample, scene_sheet

_CLIPS = 3  # each has several rows


def draw_images(encoder: Encoder, task: MasksTaskConfig, count: int) -> TaskPictures | None:
    """Return panels of `count` images."""
    if not isinstance(encoder, MaskingEncoder):
        return None
    return TaskPictures(panels(encoder, [panel for _, panel in image_panels(open_masks(task), count)]))


def draw_clips(encoder: Encoder, task: VideoMasksTaskConfig, count: int) -> TaskPictures | None:
    """Return frames of at most three clips, and an animation of the clips."""
    if not isinstance(encoder, TimedEncoder):
        return None
    clips = [clip for _, clip in clip_panels(task, min(count, _CLIPS))]
    return TaskPictures(clip_sheet(encoder, clips), clip_animation(encoder, clips))


def draw_views(encoder: Encoder, task: ViewMasksTaskConfig, count: int) -> TaskPictures | None:
    """Return every view of the first scene, because a sheet of one is as large as one of several images."""
    if not isinstance(encoder, SceneEncoder):
        return None
    source, num_context_views = open_views(task), task.num_context_views or encoder.trained_views
    _, posed, true_masks = read_sample(encoder, source, 0)
    return TaskPictures(scene_sheet(encoder, posed, true_masks, num_context_views, window=task.context_frames))


def image_panels(source: EvalSet, number: int) -> list[tuple[str, Panel]]:
    """Return keys, and images with their true masks, evenly spaced over a set."""
    # In masks with classes, the first plane contains the objects.
    masks = source.kind == "masks"
    return [
        (key, Panel(image, (fact if fact.ndim == 2 else fact[0]) if masks else None))
        for key, image, fact in _spread(source, number)
    ]


def clip_panels(task: VideoMasksTaskConfig, number: int) -> list[tuple[str, ClipPanel]]:
    """Return keys and videos of a task, evenly spaced over its set."""
    return [
        (key, ClipPanel(images, true, task.context_frames)) for key, images, true in _spread(open_clips(task), number)
    ]


def _spread(source: EvalSet, number: int) -> list[Any]:
    count = min(number, len(source))
    return [source.read(i * len(source) // count) for i in range(count)]
