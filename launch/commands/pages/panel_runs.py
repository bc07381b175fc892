"""Pages of pictures: panels of slot models with images, masks and slots; contact sheets of scenes seen by several cameras."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evals.encoders.capabilities import ViewsEncoder
from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable, whole_records
from evals.sets.base import EvalSet
from evals.sets.pictures import decode_image
from evals.sets.task_config import TaskConfig
from evals.slots.eval_inputs import open_images
from evals.suite.evaluate import tasks_for
from evals.tasks.result import format_metric
from object_centric.pictures.evaluated import clip_panels, image_panels
from object_centric.pictures.panels import Panel, clip_animation, clip_sheet, panels, save_animation, save_sheet
from object_centric.pictures.scene_sheets import read_sample, scene_sheet, turntable
from object_centric.tasks.cropped_set import CroppedTaskConfig, open_masks
from object_centric.tasks.scene_encoder import SceneEncoder
from object_centric.tasks.slot_encoder import MaskingEncoder
from object_centric.tasks.video_encoder import TimedEncoder
from object_centric.tasks.video_task import VideoMasksTaskConfig, open_clips
from object_centric.tasks.view_task import ViewMasksTaskConfig, open_views
from sparo_train.core.accelerator import available_device
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import escape_control_chars, read_bytes, write_whole

from ...views.html import render
from ..slot_work import SlotOptions


class PageRow(NamedTuple):
    """Key of a sample, and its pictures: file names next to the page, and captions."""

    key: str
    pictures: Sequence[tuple[str, str]]


def write_page(
    out: Path, title: str, summary: str, note: str, rows: Sequence[PageRow], scores: Sequence[tuple[str, str]]
) -> Path:
    """Write OUT/report.html; return its path."""
    # Keys and names are foreign text, and the page is opened in a browser.
    escaped_rows = [
        PageRow(escape_control_chars(row.key), [(name, escape_control_chars(alt)) for name, alt in row.pictures])
        for row in rows
    ]
    place = out / "report.html"
    write_whole(
        place,
        render(
            "pictures.html.jinja",
            title=escape_control_chars(title),
            summary=summary,
            note=note,
            rows=escaped_rows,
            scores=scores,
        ),
    )
    return place


def _scores(run: Path, task: str, source: EvalSet) -> list[tuple[str, str]]:
    """Return the run's latest scores of the task on this set; empty without any."""
    if not (run / "evals/results.jsonl").is_file():
        return []
    data = source.identity()
    results = [record.result for record in whole_records(run) if record.task == task and record.result.data == data]
    rows = [
        (name, format_metric(name, value, unit=True))
        for result in results[-1:]
        for name, value in result.metrics.items()
    ]
    return [*rows, *(("n", str(result.n)) for result in results[-1:])]


def draw_panels(
    checkpoint: str,
    task_name: str | None,
    images: list[Path],
    num_samples: int,
    tile: int,
    out: Path,
    options: SlotOptions,
    uncertain: bool = False,
) -> list[Path]:
    """Write the picture, or, if `out` has no suffix, a folder with a page and one picture per sample; return the paths.

    Raises:
        ConfigError: a checkpoint without reconstructions or masks, several tasks, or nothing to draw.
    """
    if task_name is None and not images:
        raise ConfigError(
            "sparo slots panels: nothing to draw. Name a task of the run (--task masks) or your own images (--image FILE)."
        )
    encoder = load_encoder(checkpoint, options.model, available_device().type)
    if not isinstance(encoder, MaskingEncoder):
        instead = (
            "Use `sparo slots views` for scenes."
            if isinstance(encoder, ViewsEncoder)
            else "Train with objective.kind=slots, or use `sparo slots show`."
        )
        raise ConfigError(f"{checkpoint}: has no reconstructions to draw. {instead}")
    sheet_panels = [Panel(decode_image(read_bytes(path, ConfigError), path, encoder.decoding), None) for path in images]
    task = None if task_name is None else one_task(checkpoint, task_name, options)
    if isinstance(task, VideoMasksTaskConfig) and (images or not isinstance(encoder, TimedEncoder)):
        raise ConfigError(
            f"--task {task_name}: this task has videos, so it needs a video model and cannot be combined with --image. "
            "Remove --image, or choose another model or task."
        )
    if uncertain and (isinstance(task, VideoMasksTaskConfig) or not out.suffix):
        raise ConfigError(
            "--uncertain: works only with images (not videos) and a .png file as --out. Remove --uncertain, or name a .png file and "
            "images."
        )
    if not out.suffix:
        if task is None or task_name is None or images:
            raise ConfigError(
                f"--out {out}: a name without a suffix writes a page, and a page can only show a task (--task). For your own images, name a .png file."
            )
        refuse_unwritable(out, "--out")
        return _write_task_page(encoder, checkpoint, task_name, task, num_samples, tile, out)
    refuse_unwritable(out.parent, "--out")
    if isinstance(task, VideoMasksTaskConfig) and isinstance(encoder, TimedEncoder):
        clips = [clip for _, clip in clip_panels(task, num_samples)]
        if out.suffix.lower() == ".png":
            save_sheet(clip_sheet(encoder, clips, tile), out)
        else:
            save_animation(clip_animation(encoder, clips, tile), out)
        return [out]
    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: only tasks with videos can be animated. Name a .png file.")
    if task is not None:
        sheet_panels += [panel for _, panel in image_panels(_task_images(task), num_samples)]
    save_sheet(panels(encoder, sheet_panels, tile, uncertain), out)
    return [out]


def _write_task_page(
    encoder: MaskingEncoder, checkpoint: str, task_name: str, task: TaskConfig, num_samples: int, tile: int, out: Path
) -> list[Path]:
    """Write OUT/report.html, with a sheet and an animation of every clip, or a sheet of every image."""
    paths, rows = list[Path](), list[PageRow]()
    if isinstance(task, VideoMasksTaskConfig) and isinstance(encoder, TimedEncoder):
        source = open_clips(task)
        for at, (key, clip) in enumerate(clip_panels(task, num_samples)):
            sheet, moving = out / f"clip-{at}.png", out / f"clip-{at}.webp"
            save_sheet(clip_sheet(encoder, [clip], tile), sheet)
            save_animation(clip_animation(encoder, [clip], tile), moving)
            caption = f"clip {key}: frames, true masks, predicted masks, reconstruction, every slot alone"
            rows.append(PageRow(key, [(moving.name, f"Moving: {caption}"), (sheet.name, f"Frames of {caption}")]))
            paths += [moving, sheet]
    else:
        source = _task_images(task)
        for at, (key, panel) in enumerate(image_panels(source, num_samples)):
            sheet = out / f"image-{at}.png"
            save_sheet(panels(encoder, [panel], tile), sheet)
            rows.append(PageRow(key, [(sheet.name, f"Image {key}: masks, reconstruction, every slot alone")]))
            paths.append(sheet)
    summary = f"{len(rows)} samples of the task {task_name}, evenly spaced."
    note = "From the left: the sample, true masks if there are any, predicted masks, the reconstruction, and every slot's part on white."
    scores = _scores(Path(checkpoint), task_name, source)
    return [write_page(out, f"Slots of {checkpoint}", summary, note, rows, scores), *paths]


def _task_images(task: TaskConfig) -> EvalSet:
    """Return the images of a task as it scores them, cropped if it crops."""
    return open_masks(task) if isinstance(task, CroppedTaskConfig) else open_images(task)


def one_task(checkpoint: str, task_name: str, options: SlotOptions) -> TaskConfig:
    """Return the task of a run, or of `--data`, that `--task` names. Raises `ConfigError` if it stands for several."""
    tasks = tasks_for(checkpoint, options.data, [task_name], options.root, "--task")
    if len(tasks) != 1:
        raise ConfigError(f"--task {task_name}: matches {len(tasks)} tasks. Name one: {', '.join(tasks)}.")
    (task,) = tasks.values()
    return task


def draw_scenes(checkpoint: str, task_name: str, scenes: int, tile: int, out: Path, options: SlotOptions) -> list[Path]:
    """Write report.html and its pictures; return their paths.

    Raises:
        ConfigError: a checkpoint or a task without posed scenes.
    """
    encoder = load_encoder(checkpoint, None, available_device().type)
    if not isinstance(encoder, SceneEncoder):
        raise ConfigError(
            f"{checkpoint}: renders no views. Train with objective.kind=novel_views, or use `sparo slots panels`."
        )
    task = one_task(checkpoint, task_name, options)
    if not isinstance(task, ViewMasksTaskConfig):
        raise ConfigError(f"--task {task_name}: has no posed views. Name a task of kind view_masks.")
    source, num_input_views = open_views(task), task.num_context_views or encoder.trained_views
    # Before minutes of drawing, not after them.
    refuse_unwritable(out, "--out")
    paths, rows = [out / "report.html"], []
    count = min(scenes, len(source))
    for number in range(count):
        key, posed, true = read_sample(encoder, source, number * len(source) // count)
        sheet, moving = out / f"scene-{number}.png", out / f"turntable-{number}.webp"
        save_sheet(scene_sheet(encoder, posed, true, num_input_views, tile, task.context_frames), sheet)
        save_animation(turntable(encoder, posed, num_input_views, tile=tile, window=task.context_frames), moving, fps=8)
        alts = (
            f"Turntable of scene {key}: all slots, then each alone",
            f"Views of scene {key}: image, masks, rendering, and every slot alone",
        )
        rows.append(PageRow(key, list(zip((moving.name, sheet.name), alts, strict=True))))
        paths += [sheet, moving]
    write_page(
        out,
        f"Scenes of {checkpoint}",
        f"Scenes of {task_name}: {count}. Slots are computed from the first {num_input_views} views of each time; the others are held out.",
        "A slot alone is drawn on white: of radiance fields as if there were no other, else by its share of each ray.",
        rows,
        _scores(Path(checkpoint), task_name, source),
    )
    return paths
