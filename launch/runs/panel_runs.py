"""Panels of slot models, images, masks, what is drawn, and every slot alone, as one picture: `sparo slots panels`."""

from __future__ import annotations

from pathlib import Path

import torch

from evals.encoders.abilities import ViewsEncoder
from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from evals.sets.base import decoded
from evals.sets.task_config import TaskConfig
from evals.slots.material import open_images
from evals.suite.evaluate import tasks_for
from object_centric.pictures.evaluated import clip_panels, image_panels
from object_centric.pictures.panels import Panel, clip_animation, clip_sheet, panels, save_animation
from object_centric.tasks.slot_encoder import MaskingEncoder
from object_centric.tasks.video_encoder import TimedEncoder
from object_centric.tasks.video_task import VideoMasksTaskConfig
from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import read_bytes

from .slot_work import SlotOptions, told


def draw_panels(
    checkpoint: str, on: str | None, images: list[Path], number: int, tile: int, out: Path, options: SlotOptions
) -> None:
    """Write the picture.

    Raises:
        ConfigError: a checkpoint that does not draw its slots, several tasks, or nothing to draw.
    """
    if on is None and not images:
        raise ConfigError(
            "sparo slots panels: name a task of the run (--on, as in --on masks), or images of your own (--image FILE)"
        )
    encoder = load_encoder(checkpoint, options.model, "cuda" if torch.cuda.is_available() else "cpu", told)
    if not isinstance(encoder, MaskingEncoder):
        instead = (
            "`sparo slots views` draws views of scenes"
            if isinstance(encoder, ViewsEncoder)
            else "train with objective.kind=slots, or use `sparo slots show`"
        )
        raise ConfigError(f"{checkpoint}: does not draw its slots of images; {instead}")
    found = [Panel(decoded(read_bytes(path, ConfigError), path), None) for path in images]
    task = None if on is None else one_task(checkpoint, on, options)
    refuse_unwritable(out.parent, "--out")
    if isinstance(task, VideoMasksTaskConfig):
        if images or not isinstance(encoder, TimedEncoder):
            raise ConfigError(f"--on {on}: is of videos; draw them alone (without --image), of a model of videos")
        clips = clip_panels(task, number)
        if out.suffix.lower() == ".png":
            clip_sheet(encoder, clips, tile).save(out)
        else:
            save_animation(clip_animation(encoder, clips, tile), out)
        return
    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: pictures that move are of videos; name a .png file")
    if task is not None:
        found += image_panels(open_images(task), number)
    panels(encoder, found, tile).save(out)


def one_task(checkpoint: str, on: str, options: SlotOptions) -> TaskConfig:
    """The task of a run, or of `--data`, that `--on` names. Raises `ConfigError` where it stands for several."""
    tasks = tasks_for(checkpoint, options.data, [on], options.root, "--on")
    if len(tasks) != 1:
        raise ConfigError(f"--on {on}: stands for {len(tasks)} tasks; name one: {', '.join(tasks)}")
    (task,) = tasks.values()
    return task
