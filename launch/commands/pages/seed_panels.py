"""Masks of the best and the worst of several runs next to each other, as in Fig. 3 of Biza et al. (2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evals.encoders.loading import load_encoder
from evals.report.results_file import refuse_unwritable, whole_records
from evals.tasks.result import LOWER_IS_BETTER, Result, format_metric
from object_centric.pictures.evaluated import image_panels
from object_centric.pictures.panels import (
    arrange_sheet,
    background_label,
    colour_labels,
    colour_slots,
    mix_slots,
    save_sheet,
)
from object_centric.tasks.cropped_set import open_masks
from object_centric.tasks.mask_task import MasksTaskConfig, transform_mask
from object_centric.tasks.slot_encoder import MaskingEncoder
from sparo_train.core.accelerator import available_device
from sparo_train.core.errors import ConfigError

from ...views.terminal import out as printed
from ..slot_work import SlotOptions
from .panel_runs import one_task


def draw_best_and_worst(
    runs: Sequence[str], task_name: str, num_images: int, tile: int, out: Path, options: SlotOptions, uncertain: bool
) -> Path:
    """Write a picture with columns image, true masks, masks of the best run, and masks of the worst; print both scores.

    Raises:
        ConfigError: a run without a score of the task, a model without slots, or a task without masks.
    """
    refuse_unwritable(out.parent, "--out")
    for run in runs:
        if "?slots=" in run:
            raise ConfigError(
                f"{run}: scores of several runs are compared, so their number of slots cannot be changed. Remove `?slots=…`."
            )
    task = one_task(runs[0], task_name, options)
    if not isinstance(task, MasksTaskConfig):
        raise ConfigError(f"--task {task_name}: has no images with masks. Name a task of kind masks.")
    source = open_masks(task)
    scored = [(_score(run, task_name, source.identity()), run) for run in runs]
    ranked = sorted(scored, key=lambda pair: _rank(pair[0]), reverse=True)
    if len({result.headline for result, _ in ranked}) > 1:
        raise ConfigError(f"--task {task_name}: the runs were scored by different metrics. Score them again.")
    panels = [panel for _, panel in image_panels(source, num_images)]
    rows, heads = [[] for _ in panels], ["image", "true"]
    for name, (result, run) in (("best", ranked[0]), ("worst", ranked[-1])):
        encoder = load_encoder(run, options.model, available_device().type)
        if not isinstance(encoder, MaskingEncoder):
            raise ConfigError(f"{run}: has no masks to draw. Name runs of slot models.")
        pixels = encoder.stack([encoder.transform(panel.image) for panel in panels])
        soft_masks = encoder.soft_masks(pixels).cpu()
        for row, panel, image, shares in zip(rows, panels, pixels, soft_masks, strict=True):
            if not row and panel.true is not None:
                row += [image.cpu().float() / 255, colour_labels(transform_mask(encoder, panel.true))]
            labels = shares.argmax(0).numpy()
            row.append(colour_slots(labels, background_label(labels)))
            if uncertain:
                row.append(mix_slots(shares, background_label(labels)))
        heads += [name, f"{name}, shares"] if uncertain else [name]
        score = format_metric(result.headline, result.value, unit=True)
        printed.print(f"{name} of {len(runs)} runs: {run} ({result.headline} {score})", soft_wrap=True)
    save_sheet(arrange_sheet(rows, heads, tile), out)
    return out


def _score(run: str, task_name: str, data: str) -> Result:
    """Return a run's latest result of a task on the set whose identity is `data`."""
    found = [record.result for record in whole_records(Path(run)) if record.task == task_name]
    if not found:
        raise ConfigError(f"{run}: has no score of {task_name}. Score it with `sparo eval {run} --tasks {task_name}`.")
    if not (same := [result for result in found if result.data == data]):
        raise ConfigError(
            f"{run}: its scores of {task_name} are from other images than those to be drawn. To score the images to "
            f"be drawn, run `sparo eval {run} --tasks {task_name}` (with the same --data, if any). Alternatively, "
            "repeat this command with the --data file with which the run was scored."
        )
    return same[-1]


def _rank(result: Result) -> float:
    return -result.value if result.headline in LOWER_IS_BETTER else result.value
