"""Panels of slot models, images, masks, what is drawn, and every slot alone, as one PNG: `sparo slots panels`, and while one trains."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from evals.encoders.abilities import ViewsEncoder
from evals.encoders.encoder import Encoder
from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from evals.sets.base import decoded
from evals.sets.task_config import TaskConfig
from evals.slots.material import open_images
from evals.suite.evaluate import tasks_for
from object_centric.pictures.panels import ClipPanel, Panel, clip_animation, clip_sheet, panels, save_animation
from object_centric.pictures.scene_sheets import sample_of, scene_sheet
from object_centric.tasks.scene_encoder import SceneEncoder
from object_centric.tasks.slot_encoder import MaskingEncoder
from object_centric.tasks.video_encoder import TimedEncoder
from object_centric.tasks.video_task import VideoMasksTaskConfig, open_clips
from object_centric.tasks.view_task import ViewMasksTaskConfig, open_views
from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import read_bytes
from sparo_train.train.run import LogConfig

from .slot_work import SlotOptions, told

_CLIPS = 3  # of a training's picture; each has several rows


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
        clips = clips_of(task, number)
        if out.suffix.lower() == ".png":
            clip_sheet(encoder, clips, tile).save(out)
        else:
            save_animation(clip_animation(encoder, clips, tile), out)
        return
    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: pictures that move are of videos; name a .png file")
    if task is not None:
        found += _samples(task, number)
    panels(encoder, found, tile).save(out)


class TrainingPictures:
    """Panels at every evaluation: RUN/pictures/step-….png, and a run of its own in tensorboard. A failure is said, and ends them."""

    task: TaskConfig | None

    def __init__(self, config: LogConfig, task: TaskConfig, folder: Path, say: Callable[[str], None]):
        self.config, self.task, self.folder, self.say = config, task, folder, say

    def draw(self, encoder: Encoder, step: int) -> None:
        """Where the encoder draws its slots, and there is a set of masks to draw from."""
        if self.task is None or not isinstance(encoder, MaskingEncoder | SceneEncoder):
            return
        try:
            place = self.folder / "pictures" / f"step-{step:08d}.png"
            place.parent.mkdir(exist_ok=True)
            moving = b""
            if isinstance(encoder, SceneEncoder):
                if not isinstance(self.task, ViewMasksTaskConfig):
                    return
                source, shown = open_views(self.task), self.task.shown or encoder.trained_views
                _, posed, true = sample_of(encoder, source, 0)
                sheet = scene_sheet(encoder, posed, true, shown, window=self.task.window)
            elif isinstance(self.task, VideoMasksTaskConfig):
                if not isinstance(encoder, TimedEncoder):
                    return
                clips = clips_of(self.task, min(self.config.pictures, _CLIPS))
                sheet, sheets = clip_sheet(encoder, clips), clip_animation(encoder, clips)
                save_animation(sheets, place.with_suffix(".webp"))
                stream = io.BytesIO()
                save_animation(sheets, stream, format="GIF")  # which is what tensorboard plays
                moving = stream.getvalue()
            else:
                sheet = panels(encoder, _samples(self.task, self.config.pictures))
            sheet.save(place)
            if self.config.tensorboard:
                _to_tensorboard(self.folder, sheet, moving, step)
        except Exception as error:  # what only shows must not end a run, however it fails
            self.task = None
            first = str(error).partition("\n")[0][:200]
            self.say(f"pictures cannot be drawn ({type(error).__name__}: {first}); log.pictures=0 does without")


def _to_tensorboard(folder: Path, sheet: Image.Image, moving: bytes, step: int) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from torch.utils.tensorboard.writer import SummaryWriter  # a second to import: only where it is used

    # Beside the scalars' folder of events: of two files in one, tensorboard follows the newer alone.
    with SummaryWriter(str(folder / "tensorboard" / "pictures")) as writer:
        writer.add_image("slots", np.asarray(sheet), step, dataformats="HWC")
        if moving and writer.file_writer is not None:
            image = Summary.Image(encoded_image_string=moving, colorspace=3)
            writer.file_writer.add_summary(Summary(value=[Summary.Value(tag="clips", image=image)]), step)


def clips_of(task: VideoMasksTaskConfig, number: int) -> list[ClipPanel]:
    """Videos of a task, evenly over its set."""
    source = open_clips(task)
    count = min(number, len(source))
    rows: list[Any] = [source.read(i * len(source) // count) for i in range(count)]
    return [ClipPanel(images, true, task.window) for _, images, true in rows]


def one_task(checkpoint: str, on: str, options: SlotOptions) -> TaskConfig:
    """The task of a run, or of `--data`, that `--on` names. Raises `ConfigError` where it stands for several."""
    tasks = tasks_for(checkpoint, options.data, [on], options.root, "--on")
    if len(tasks) != 1:
        raise ConfigError(f"--on {on}: stands for {len(tasks)} tasks; name one: {', '.join(tasks)}")
    (task,) = tasks.values()
    return task


def _samples(task: TaskConfig, number: int) -> list[Panel]:
    """Images of a task, evenly over its set."""
    source = open_images(task)
    count = min(number, len(source))
    rows = [source.read(i * len(source) // count) for i in range(count)]
    # Of masks with classes the objects are the first plane.
    masks = [(fact if fact.ndim == 2 else fact[0]) if source.kind == "masks" else None for *_, fact in rows]
    return [Panel(image, mask) for (_, image, _), mask in zip(rows, masks, strict=True)]
