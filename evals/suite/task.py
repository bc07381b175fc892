"""What a task is: one value, which `sparo.tasks` names."""

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
    """What a task needs of an encoder, what is so where one does not offer it, and what to do then."""

    what: str
    instead: str
    remedy: str


NEEDS = {
    "images": Need("images or clips encoded", "takes views with their cameras", "use view_masks or scene_probe"),
    "texts": Need("texts encoded", "encodes images alone", "use knn, linear or probe"),
    "conditioned": Need(
        "patches that texts pool", "has none", "use retrieval, or train with objective.model.readout.kind=flair"
    ),
    "blocks": Need("the last blocks of a DINO backbone", "has none", "use probe"),
    "tokens": Need("a vision transformer's tokens", "gives none", "use probe or knn"),
    "slots": Need("slots", "has none", "use a model with a read-out (objective.model.readout.kind=sparo)"),
    "masks": Need("a mask per slot", "has none", "use an object-centric model"),
    "drawing": Need("images drawn again", "draws none", "use a slot model that has a decoder"),
    "clips": Need("a mask per slot of every frame", "takes images alone", "train with objective.kind=video_slots"),
    "views": Need("posed views drawn", "takes images without cameras", "train with objective.kind=novel_views"),
    "loss": Need("what it was trained with", "is weights alone", "name a run folder of `sparo train`"),
    "objects": Need("objects listed", "lists none", "train with objective.kind=set_prediction"),
}


class TaskPictures(NamedTuple):
    """What is drawn at an evaluation while a run trains: a sheet, and the frames of a moving one, where there is something that moves."""

    sheet: Image.Image
    frames: Sequence[Image.Image] = ()


@dataclass(frozen=True)
class Task:
    """A row of `sparo.tasks`.

    Args:
        config: the entry of `eval.tasks`, with `task: Literal[NAME] = NAME`.
        run: scores it.
        check: raises `DataError` now where the config's data is not there, or not what the task takes.
        needs: of `NEEDS`, or words of one's own that an encoder's `offers` may have.
        facts: what its set says of every image, where it has one set (evals/sets/base.py: FactKind).
        incompatibility: why this config cannot be scored with an encoder that offers all of `needs`, and what to do; None: it can.
        pictures: `module:attribute` of `(encoder, config, how many) -> TaskPictures | None`, which draws at evaluations of a run; imported
            when something is drawn. Empty: of this task nothing is.
    """

    config: type[TaskConfig]
    run: Callable[[Scoring, Any], Result]
    check: Callable[[Any], None]
    needs: tuple[str, ...] = ()
    facts: str = "label"
    incompatibility: Callable[[Any, Any], str | None] = lambda task, encoder: None
    pictures: str = ""


class IncompatibleTaskError(ConfigError):
    """A task that this kind of encoder cannot do; raised before anything is encoded."""


def check_compatible(name: str, task: TaskConfig, encoder: Encoder) -> None:
    """Raise `IncompatibleTaskError` where `encoder` does not offer what the task needs, or not as it is set; `name`: what the task is called."""
    row: Task = TASKS.get(task.task)
    needs = row.needs
    # What is made of clips or of views asks for no image on its own.
    for word in needs if {"clips", "views", "loss"} & set(needs) else ("images", *needs):
        if word not in encoder.offers:
            # Who takes posed views takes neither images nor clips, and is told of its own tasks.
            lacked = "images" if word == "clips" and "views" in encoder.offers else word
            offered = ", ".join(sorted(encoder.offers)) or "nothing more"
            need = NEEDS.get(lacked, Need(lacked, "does not offer that", f"it offers {offered}"))
            if isinstance(encoder, MaskedEncoder | SelectedHeads):
                need = need._replace(
                    instead="is encodings alone, as some of them were chosen", remedy="leave --slots away for it"
                )
            raise IncompatibleTaskError(f"{name}: needs {need.what}, and {encoder.label} {need.instead}; {need.remedy}")
    if reason := row.incompatibility(task, encoder):
        raise IncompatibleTaskError(f"{name}.{reason}")


def encoder_of(objective: Objective, config: Any) -> Encoder:
    """What encodes inside a training objective, on its device, in evaluation mode; `config`: the run's recipe."""
    encoder: Encoder = encoder_entry(config.objective.kind)(objective)
    encoder.trained = TrainingRun(objective, config)
    encoder.map_pixels(config.data.pixel_range)
    return encoder


def check_tasks_compatible(
    objective: Objective,
    config: Any,
    tasks: Mapping[str, TaskConfig],
    block: str = "eval.tasks",
    exported: bool = False,
) -> None:
    """Raise `IncompatibleTaskError` where one of a recipe's (`config`) tasks cannot be done with what it trains, or (`exported`) with an export of it."""
    if not tasks:
        return
    try:
        encoder = encoder_of(objective, config)
        if exported:
            encoder.trained = None
        encoder.label = encoder.label or f"objective.kind={config.objective.kind}"
        for name, task in tasks.items():
            check_compatible(f"{block}.{name}", task, encoder)
    finally:
        objective.train()  # an encoder puts its model into evaluation mode


def check_recipe_compatible(config: RunConfig, objective: Objective | None = None) -> None:
    """Raise `ConfigError` where `eval.tasks` or `eval.job` of a recipe cannot be done with what it trains.

    Args:
        objective: what is trained; default: made of the recipe on the meta device, which takes no memory.
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
                f"eval.job: objective.kind={config.objective.kind} names no layout to export to, which a job of its own would read"
            )


def select_tasks(tasks: Mapping[str, Any], only: Iterable[str] | None) -> dict[str, Any]:
    """The tasks of these names (default: all). Raises `ConfigError` with a near miss."""
    names = list(only or tasks)
    for name in names:
        if name not in tasks:
            raise ConfigError(f"--tasks {name}: {did_you_mean(name, tasks)}")
    return {name: task for name, task in tasks.items() if name in names}
