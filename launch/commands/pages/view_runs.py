"""Scenes that several cameras see, as a page with contact sheets and turns around them: `sparo slots views`."""

from __future__ import annotations

from pathlib import Path

import torch

from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable
from object_centric.pictures.panels import save_animation, save_sheet
from object_centric.pictures.scene_sheets import read_sample, scene_sheet, turntable
from object_centric.tasks.scene_encoder import SceneEncoder
from object_centric.tasks.view_task import ViewMasksTaskConfig, open_views
from sparo_train.core.errors import ConfigError

from ..slot_work import SlotOptions
from .panel_runs import one_task
from .picture_page import PageRow, write_page


def draw_scenes(checkpoint: str, task_name: str, scenes: int, tile: int, out: Path, options: SlotOptions) -> list[Path]:
    """Write report.html and its pictures; returns their paths.

    Raises:
        ConfigError: a checkpoint or a task that is not of posed scenes.
    """
    encoder = load_encoder(checkpoint, None, "cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(encoder, SceneEncoder):
        raise ConfigError(
            f"{checkpoint}: draws no views; train with objective.kind=novel_views, or use `sparo slots panels`"
        )
    task = one_task(checkpoint, task_name, options)
    if not isinstance(task, ViewMasksTaskConfig):
        raise ConfigError(f"--task {task_name}: is not of posed views; name a task of kind view_masks")
    source, num_input_views = open_views(task), task.num_context_views or encoder.trained_views
    # Before minutes of drawing, not behind them.
    refuse_unwritable(out, "--out")
    paths, rows = [out / "report.html"], []
    count = min(scenes, len(source))
    for number in range(count):
        key, posed, true = read_sample(encoder, source, number * len(source) // count)
        sheet, moving = out / f"scene-{number}.png", out / f"turntable-{number}.webp"
        save_sheet(scene_sheet(encoder, posed, true, num_input_views, tile, task.context_frames), sheet)
        save_animation(turntable(encoder, posed, num_input_views, tile=tile, window=task.context_frames), moving, fps=8)
        alts = (
            f"A turn around scene {key}: all slots, then each alone",
            f"Views of scene {key}: true, masks, drawn, and every slot alone",
        )
        rows.append(PageRow(key, list(zip((moving.name, sheet.name), alts, strict=True))))
        paths += [sheet, moving]
    write_page(
        out,
        checkpoint,
        task_name,
        f"Scenes of {checkpoint}",
        f"Scenes of {task_name}: {count}. Slots are made of the first {num_input_views} views of each time; the others are held out.",
        "A slot alone is drawn on white: of radiance fields as if there were no other, else by its share of each ray.",
        rows,
    )
    return paths
