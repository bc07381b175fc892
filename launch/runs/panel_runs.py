"""`sparo slots panels`: images, masks, what is drawn, and every slot alone, as one PNG."""

from __future__ import annotations

from pathlib import Path

import torch

from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from evals.sets.base import decoded
from evals.slots.material import open_images
from evals.suite.evaluate import tasks_for
from object_centric.pictures.panels import Panel, panels
from object_centric.tasks.slot_encoder import MaskingEncoder
from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import read_bytes


def draw_panels(checkpoint: str, on: str | None, images: list[Path], number: int, tile: int, out: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: a checkpoint that does not draw its slots, several tasks, or nothing to draw.
    """
    if on is None and not images:
        raise ConfigError("sparo slots panels: name a task (--on), or images of your own (--image FILE)")
    refuse_unwritable(out.parent, "--out")
    encoder = load_encoder(checkpoint, None, "cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(encoder, MaskingEncoder):
        raise ConfigError(
            f"{checkpoint}: does not draw its slots; train with objective.kind=slots, or use `sparo slots show`"
        )
    found = [Panel(decoded(read_bytes(path, ConfigError), path), None) for path in images]
    if on is not None:
        found += _of_task(checkpoint, on, number)
    panels(encoder, found, tile).save(out)


def _of_task(checkpoint: str, on: str, number: int) -> list[Panel]:
    tasks = tasks_for(checkpoint, None, [on], Path("data"), "--on")
    if len(tasks) != 1:
        raise ConfigError(f"--on {on}: stands for {len(tasks)} tasks; name one: {', '.join(tasks)}")
    (task,) = tasks.values()
    source = open_images(task)
    count = min(number, len(source))
    rows = [source.read(i * len(source) // count) for i in range(count)]
    masks = [(fact if fact.ndim == 2 else fact[0]) if source.kind == "masks" else None for *_, fact in rows]
    return [Panel(image, mask) for (_, image, _), mask in zip(rows, masks, strict=True)]
