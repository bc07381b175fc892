"""Panels of slot models, images, masks, what is drawn, and every slot alone, as one PNG: `sparo slots panels`, and while one trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from evals.encoders.encoder import Encoder
from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from evals.sets.base import decoded
from evals.sets.task_config import TaskConfig
from evals.slots.material import open_images
from evals.suite.evaluate import tasks_for
from object_centric.pictures.panels import Panel, panels
from object_centric.tasks.slot_encoder import MaskingEncoder
from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import read_bytes
from sparo_train.train.run import LogConfig

from .slot_work import told


def draw_panels(checkpoint: str, on: str | None, images: list[Path], number: int, tile: int, out: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: a checkpoint that does not draw its slots, several tasks, or nothing to draw.
    """
    if on is None and not images:
        raise ConfigError(
            "sparo slots panels: name a task of the run (--on, as in --on masks), or images of your own (--image FILE)"
        )
    refuse_unwritable(out.parent, "--out")
    encoder = load_encoder(checkpoint, None, "cuda" if torch.cuda.is_available() else "cpu", told)
    if not isinstance(encoder, MaskingEncoder):
        raise ConfigError(
            f"{checkpoint}: does not draw its slots; train with objective.kind=slots, or use `sparo slots show`"
        )
    found = [Panel(decoded(read_bytes(path, ConfigError), path), None) for path in images]
    if on is not None:
        found += _of_task(checkpoint, on, number)
    panels(encoder, found, tile).save(out)


class TrainingPictures:
    """Panels at every evaluation: RUN/pictures/step-….png, and a run of its own in tensorboard. A failure is said, and ends them."""

    def __init__(self, config: LogConfig, tasks: Mapping[str, TaskConfig], folder: Path, say: Callable[[str], None]):
        self.config, self.folder, self.say = config, folder, say
        self.task = next((task for task in tasks.values() if task.task == "masks"), None) if config.pictures else None

    def draw(self, encoder: Encoder, step: int) -> None:
        """Where the encoder draws its slots, and there is a set of masks to draw from."""
        if self.task is None or not isinstance(encoder, MaskingEncoder):
            return
        try:
            sheet = panels(encoder, _samples(self.task, self.config.pictures))
            place = self.folder / "pictures" / f"step-{step:08d}.png"
            place.parent.mkdir(exist_ok=True)
            sheet.save(place)
            if self.config.tensorboard:
                from torch.utils.tensorboard.writer import SummaryWriter  # a second to import: only where it is used

                # Beside the scalars' folder of events: of two files in one, tensorboard follows the newer alone.
                with SummaryWriter(str(self.folder / "tensorboard" / "pictures")) as writer:
                    writer.add_image("slots", np.asarray(sheet), step, dataformats="HWC")
        except Exception as error:  # what only shows must not end a run, however it fails
            self.task = None
            first = str(error).partition("\n")[0][:200]
            self.say(f"pictures cannot be drawn ({type(error).__name__}: {first}); log.pictures=0 does without")


def _of_task(checkpoint: str, on: str, number: int) -> list[Panel]:
    tasks = tasks_for(checkpoint, None, [on], Path("data"), "--on")
    if len(tasks) != 1:
        raise ConfigError(f"--on {on}: stands for {len(tasks)} tasks; name one: {', '.join(tasks)}")
    (task,) = tasks.values()
    return _samples(task, number)


def _samples(task: TaskConfig, number: int) -> list[Panel]:
    """Images of a task, evenly over its set."""
    source = open_images(task)
    count = min(number, len(source))
    rows = [source.read(i * len(source) // count) for i in range(count)]
    masks = [(fact if fact.ndim == 2 else fact[0]) if source.kind == "masks" else None for *_, fact in rows]
    return [Panel(image, mask) for (_, image, _), mask in zip(rows, masks, strict=True)]
