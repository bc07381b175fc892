"""Pictures at the evaluations of a run: RUN/pictures/step-….png (and animations as .webp), and a separate tensorboard run."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
from PIL import Image

from evals.encoders.encoder import Encoder
from evals.sets.task_config import TaskConfig
from evals.suite.task import TaskPictures
from sparo_train.core.files import whole_file
from sparo_train.core.registries import TASKS
from sparo_train.train.run_config import LogConfig

logger = logging.getLogger(__name__)


class TrainingPictures:
    """Writer of pictures of the first task that has any. A failure is logged and disables it."""

    task: TaskConfig | None

    def __init__(self, config: LogConfig, task: TaskConfig, folder: Path):
        self.config, self.task, self.folder = config, task, folder

    def draw(self, encoder: Encoder, step: int) -> None:
        """Draw, if this encoder supports it."""
        if self.task is None:
            return
        try:
            # Imported here, not at the start, because the drawing function may come from a plug-in.
            pictures: TaskPictures | None = resolve_name(TASKS.get(self.task.task).pictures)(
                encoder, self.task, self.config.pictures
            )
            if pictures is not None:
                self._write(pictures, step)
        except Exception as error:  # a failing picture must not end a run
            self.task = None
            first = str(error).partition("\n")[0][:200]
            logger.warning(
                f"pictures could not be drawn ({type(error).__name__}: {first}). The run continues without them; log.pictures=0 hides this warning."
            )

    def _write(self, pictures: TaskPictures, step: int) -> None:
        place = self.folder / "pictures" / f"step-{step:08d}.png"
        place.parent.mkdir(exist_ok=True)
        moving = b""
        if pictures.frames:
            from object_centric.pictures.panels import save_animation

            save_animation(pictures.frames, place.with_suffix(".webp"))
            stream = io.BytesIO()
            save_animation(pictures.frames, stream, format="GIF")  # tensorboard plays GIF
            moving = stream.getvalue()
        with whole_file(place) as temporary:
            pictures.sheet.save(temporary)
        if self.config.tensorboard:
            _to_tensorboard(self.folder, self.task.task if self.task else "", pictures.sheet, moving, step)


def _to_tensorboard(folder: Path, task: str, sheet: Image.Image, moving: bytes, step: int) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from torch.utils.tensorboard.writer import SummaryWriter  # imports in a second, so only where it is used

    # Separate from the scalars' folder of events, because tensorboard only follows the newest file in a folder.
    with SummaryWriter(str(folder / "tensorboard" / "pictures")) as writer:
        writer.add_image(task, np.asarray(sheet), step, dataformats="HWC")
        if moving and writer.file_writer is not None:
            image = Summary.Image(encoded_image_string=moving, colorspace=3)
            writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=f"{task}, moving", image=image)]), step)
