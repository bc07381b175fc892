"""Tasks: entries of `sparo.tasks`, and their requirements on encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image

from sparo_train.core.contracts import Objective
from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.registries import METHODS, TASKS
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig

from ..encoders.capabilities import TrainingRun
from ..encoders.encoder import Encoder
from ..encoders.heads import SelectedHeads
from ..encoders.loading import encoder_entry
from ..encoders.selection import MaskedEncoder
from ..sets.task_config import TaskConfig
from ..tasks.result import Result
from .scoring import Scoring


class Need(NamedTuple):
    """Requirement of a task, the message if an encoder lacks it, and the remedy."""

    what: str
    instead: str
    remedy: str


NEEDS = {
    "images": Need("an encoder of images or clips", "takes views with their cameras", "Use view_masks or scene_probe."),
    "texts": Need("a text tower", "has none", "Use knn, linear or probe."),
    "conditioned": Need(
        "patches that texts pool", "has none", "Use retrieval, or train with objective.model.readout.kind=flair."
    ),
    "blocks": Need("the last blocks of a DINO backbone", "has none", "Use probe."),
    "tokens": Need("the tokens of a vision transformer", "has none", "Use probe or knn."),
    "dense": Need(
        "encodings of patches in the space of its texts",
        "has none (it needs a text tower, and open_clip's vision transformer)",
        "Use linear_segmentation or knn_segmentation.",
    ),
    "slots": Need("slots", "has none", "Use a model with a slot readout (objective.model.readout.kind=sparo)."),
    "masks": Need("a mask per slot", "has none", "Use an object-centric model."),
    "drawing": Need(
        "reconstructed images",
        "reconstructs no single images",
        "Use a slot model of images with a decoder. For videos, use video_masks with generate_frames=true.",
    ),
    "clips": Need("a mask per slot and frame", "takes single images", "Train with objective.kind=video_slots."),
    "views": Need("rendered views", "takes images without cameras", "Train with objective.kind=novel_views."),
    "loss": Need("the recipe of its training run", "has weights only", "Give a run folder of `sparo train`."),
    "objects": Need("predicted objects", "has none", "Train with objective.kind=set_prediction."),
}


class TaskPictures(NamedTuple):
    """Pictures of an evaluation during training: a sheet, and frames of an animation if something moves."""

    sheet: Image.Image
    frames: Sequence[Image.Image] = ()


@dataclass(frozen=True)
class Task:
    """Entry of `sparo.tasks`.

    Args:
        config: the entry of `eval.tasks`, with `task: Literal[NAME] = NAME`.
        run: scores it.
        check: raises `DataError` if the config's data are missing, or of another kind.
        needs: requirements in `NEEDS`, or other words that an encoder's `offers` may contain.
        facts: annotations that its set needs for every image, if it has one set (evals/sets/base.py: FactKind).
        incompatibility: returns why this config cannot be scored with an encoder that offers all of `needs`, and the
            remedy; None: it can.
        pictures: `module:attribute` of `(encoder, config, how many) -> TaskPictures | None`, which draws at evaluations
            of a run; imported
            when something is drawn. Empty: the task has no pictures.
    """

    config: type[TaskConfig]
    run: Callable[[Scoring, Any], Result]
    check: Callable[[Any], None]
    needs: tuple[str, ...] = ()
    facts: str = "label"
    incompatibility: Callable[[Any, Encoder], str | None] = lambda task, encoder: None
    pictures: str = ""


class IncompatibleTaskError(ConfigError):
    """A task that the encoder does not support; raised before anything is encoded."""


def check_compatible(name: str, task: TaskConfig, encoder: Encoder) -> None:
    """Raise `IncompatibleTaskError` if `encoder` lacks a requirement of the task, or does not support its settings."""
    row: Task = TASKS.get(task.task)
    needs = row.needs
    # Features of clips or views do not imply features of single images.
    for word in needs if {"clips", "views", "loss"} & set(needs) else ("images", *needs):
        if word not in encoder.offers:
            # Encoders of posed views take neither images nor clips, so suggest their own tasks.
            lacked = "images" if word == "clips" and "views" in encoder.offers else word
            offered = ", ".join(sorted(encoder.offers)) or "nothing more"
            need = NEEDS.get(lacked, Need(lacked, "does not offer it", f"It offers {offered}."))
            if isinstance(encoder, MaskedEncoder | SelectedHeads):
                need = need._replace(
                    instead="has encodings of selected slots only", remedy="Remove --slots for this task."
                )
            raise IncompatibleTaskError(f"{name}: needs {need.what}, but {encoder.label} {need.instead}. {need.remedy}")
    if reason := row.incompatibility(task, encoder):
        raise IncompatibleTaskError(f"{name}.{reason}")


def build_encoder(objective: Objective, config: Any) -> Encoder:
    """Return the encoder of a training objective, on its device, in evaluation mode; `config` is the run's recipe."""
    encoder: Encoder = encoder_entry(config.objective.kind)(objective)
    encoder.trained = TrainingRun(objective, config)
    encoder.read_like(config.data)
    return encoder


def check_tasks_compatible(
    objective: Objective,
    config: Any,
    tasks: Mapping[str, TaskConfig],
    block: str = "eval.tasks",
    exported: bool = False,
) -> None:
    """Raise `IncompatibleTaskError` if a recipe's tasks cannot be scored with the model that it trains, or (`exported`) with its export."""
    if not tasks:
        return
    try:
        encoder = build_encoder(objective, config)
        if exported:
            encoder.trained = None
        encoder.label = encoder.label or f"objective.kind={config.objective.kind}"
        for name, task in tasks.items():
            check_compatible(f"{block}.{name}", task, encoder)
    finally:
        objective.train()  # an encoder puts its model into evaluation mode


def check_recipe_compatible(config: RunConfig, objective: Objective | None = None) -> None:
    """Raise `ConfigError` if `eval.tasks` or `eval.job` of a recipe cannot be scored with the model that it trains.

    Args:
        config: the recipe.
        objective: the trained objective; default: built from the recipe on the meta device, which needs no memory.
    """
    side = config.eval.job
    if not config.eval.tasks and side is None:
        return
    if objective is None:
        with torch.device("meta"):
            objective = build_objective(config)
    check_tasks_compatible(objective, config, config.eval.tasks)
    if side is not None:
        check_tasks_compatible(objective, config, side.tasks, "eval.job.tasks", exported=True)
        if not METHODS.get(config.objective.kind).exports:
            raise ConfigError(
                f"eval.job: scores an exported model, but objective.kind={config.objective.kind} cannot be exported. Remove eval.job."
            )


def select_tasks(tasks: Mapping[str, Any], only: Iterable[str] | None) -> dict[str, Any]:
    """Return the tasks with these names (default: all). Raises `ConfigError` with a suggestion."""
    names = list(only or tasks)
    for name in names:
        if name not in tasks:
            raise ConfigError(f"--tasks {name}: {did_you_mean(name, tasks)}")
    return {name: task for name, task in tasks.items() if name in names}
