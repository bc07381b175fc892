"""Scenes that several cameras see, as a page with contact sheets and turns around them: `sparo slots views`."""

from __future__ import annotations

from pathlib import Path

import torch
from jinja2 import Environment

from evals.encoders.loading import load_encoder
from evals.report.results_file import read_records, refuse_unwritable
from evals.tasks.result import shown as in_words
from object_centric.pictures.panels import save_animation
from object_centric.pictures.scene_sheets import sample_of, scene_sheet, turntable
from object_centric.tasks.scene_encoder import SceneEncoder
from object_centric.tasks.view_task import ViewMasksTaskConfig, open_views
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import write_whole
from sparo_train.core.untrusted import shown as harmless

from .. import views
from .panel_runs import one_task
from .slot_work import SlotOptions, told


def draw_scenes(checkpoint: str, on: str, scenes: int, tile: int, out: Path, options: SlotOptions) -> list[Path]:
    """Write report.html and its pictures; returns their paths.

    Raises:
        ConfigError: a checkpoint or a task that is not of posed scenes.
    """
    encoder = load_encoder(checkpoint, None, "cuda" if torch.cuda.is_available() else "cpu", told)
    if not isinstance(encoder, SceneEncoder):
        raise ConfigError(
            f"{checkpoint}: draws no views; train with objective.kind=novel_views, or use `sparo slots panels`"
        )
    task = one_task(checkpoint, on, options)
    if not isinstance(task, ViewMasksTaskConfig):
        raise ConfigError(f"--on {on}: is not of posed views; name a task of kind view_masks")
    source, shown = open_views(task), task.shown or encoder.trained_views
    # Before minutes of drawing, not behind them.
    refuse_unwritable(out, "--out")
    paths, rows = [out / "report.html"], []
    count = min(scenes, len(source))
    for number in range(count):
        key, posed, true = sample_of(encoder, source, number * len(source) // count)
        sheet, moving = out / f"scene-{number}.png", out / f"turntable-{number}.webp"
        scene_sheet(encoder, posed, true, shown, tile, task.window).save(sheet)
        save_animation(turntable(encoder, posed, shown, tile=tile, window=task.window), moving, fps=8)
        rows.append({"key": harmless(key), "sheet": sheet.name, "turntable": moving.name})
        paths += [sheet, moving]
    template = (Path(views.__file__).parent / "scenes.html.jinja").read_text(encoding="utf-8")
    facts = {"checkpoint": harmless(checkpoint), "task": on, "count": count, "shown": shown, "scenes": rows}
    # Keys and names are others' texts, and the page is opened in a browser.
    page = Environment(autoescape=True).from_string(template)
    write_whole(paths[0], page.render(**facts, scores=_scores(Path(checkpoint), on)))
    return paths


def _scores(run: Path, task: str) -> list[tuple[str, str]]:
    """What the run was last scored with on this task; empty where it was not."""
    if not (run / "evals/results.jsonl").is_file():
        return []
    found = [record for record in read_records([run]) if record.task == task]
    return (
        [(name, in_words(name, value, unit=True)) for name, value in found[-1].result.metrics.items()] if found else []
    )
