"""Common parts of the `sparo slots` commands: a checkpoint, its units, the store of its features, and its tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.encoders.encoder import Encoder
from evals.encoders.loading import load_encoder
from evals.encoders.selection import Selection, keep_units, read_selection
from evals.feature_store.feature_table import Features
from evals.feature_store.features import FeatureStore
from evals.sets.base import EvalSet
from evals.sets.task_config import TaskConfig
from evals.slots.eval_inputs import Material, encode_set, material, open_images
from evals.slots.page_arrays import Arrays, limit_task, make_arrays
from evals.slots.quality_measures import Quality, measure_quality
from evals.slots.units import KINDS, Units, make_units
from evals.suite.evaluate import tasks_for
from sparo_train.core.accelerator import available_device
from sparo_train.core.errors import ConfigError, DataError, did_you_mean
from sparo_train.core.files import write_whole
from sparo_train.core.registries import TASKS

from ..views.results_table import Encoding
from ..views.terminal import console

# Tasks whose score is a sum over units; probes need a layer per unit and are only used if named.
_BY_UNIT = ("zeroshot", "pairs", "choice", "matching", "paraphrases", "knn")
EITHER = "either"  # units: slots if there are any, otherwise equal parts, as compared in Table 5


@dataclass(frozen=True)
class SlotOptions:
    """Options of all `sparo slots` commands.

    Attributes:
        data, root: as in `sparo eval`.
        units, parts, head_layers: kind of units.
        classifier_slots: slice or renorm.
    """

    model: str | None = None
    data: Path | None = None
    root: Path = Path("data")
    features: Path | None = None
    limit: int | None = None
    units: str = "slots"
    parts: int | None = None
    head_layers: int = 4
    classifier_slots: str = "slice"


class Bench:
    """A loaded checkpoint with its units."""

    def __init__(self, checkpoint: str, options: SlotOptions):
        for key, value, choices in (
            ("units", options.units, (*KINDS, EITHER)),
            ("classifier-slots", options.classifier_slots, ("slice", "renorm")),
        ):
            if value not in choices:
                raise ConfigError(f"--{key} {value}: {did_you_mean(value, choices)}")
        self.checkpoint, self.options = checkpoint, options
        device = available_device().type
        self.encoder: Encoder = load_encoder(checkpoint, options.model, device)
        kind: Any = options.units
        if kind == EITHER:
            # Table 5 compares models without slots by cutting their encodings into equally many parts.
            kind = "slots" if self.encoder.slots > 1 else "parts"
        self.units: Units = make_units(self.encoder, kind, options.parts, options.head_layers)

    def tasks(self, names: Sequence[str] | None, option: str = "--report-tasks") -> dict[str, TaskConfig]:
        """Return tasks by the names that `sparo eval --tasks` accepts; None: all of the run or YAML."""
        found = tasks_for(self.checkpoint, self.options.data, names, self.options.root, option)
        if self.options.limit is not None:
            found = {name: task.model_copy(update={"limit": self.options.limit}) for name, task in found.items()}
        return found

    def material(self, tasks: dict[str, TaskConfig]) -> dict[str, Material]:
        """Return the encodings of tasks, with a progress bar for those that are not stored."""
        with Encoding(self.checkpoint, False) as report:
            store = self._store(report)
            return {
                name: material(name, task, self.units, store, self.options.classifier_slots)
                for name, task in tasks.items()
            }

    def arrays(self, tasks: dict[str, TaskConfig]) -> dict[str, Arrays]:
        """Return the arrays of tasks for a page, limited to a page's number of images."""
        some = {name: limit_task(task, self.options.limit) for name, task in tasks.items()}
        with Encoding(self.checkpoint, False) as report:
            store = self._store(report)
            return {
                name: make_arrays(name, task, self.units, store, self.options.classifier_slots)
                for name, task in some.items()
            }

    def images(self, source: EvalSet) -> Features:
        """Return the encodings of a set's images."""
        with Encoding(self.checkpoint, False) as report:
            return encode_set(source, self.units, self._store(report), 0)

    def read_selection(self, path: Path, option: str) -> Selection:
        """Return a selection of this checkpoint's units. Raises `ConfigError`, beginning with `option`, for any other."""
        selection = read_selection(path)
        keep_units(self.encoder, selection, f"{option} {path}")
        if (selection.units, selection.count) != (self.units.kind, self.units.number):
            raise ConfigError(
                f"{option} {path}: was saved for a model with {selection.count} {selection.units}, but this one has "
                f"{self.units.number} {self.units.kind}. Name another file."
            )
        return selection

    def quality(self, label: str, task: TaskConfig, judge: Encoder | None) -> Quality:
        """Return the quality of units on a task's images, with a reference encoder if given."""
        source = open_images(task)
        with Encoding(self.checkpoint, False) as report:
            return measure_quality(label, self.units, source, self._store(report), judge, getattr(task, "workers", 0))

    def _store(self, report: Any) -> FeatureStore:
        return FeatureStore(self.options.features, "fp32", report)

    def single_task(self, name: str, option: str) -> tuple[str, TaskConfig]:
        """Return the single task with a name. Raises `ConfigError` if it stands for several."""
        tasks = self.tasks([name], option)
        if len(tasks) > 1:
            raise ConfigError(f"{option} {name}: matches {len(tasks)} tasks ({', '.join(tasks)}). Name one.")
        return next(iter(tasks.items()))


def supported_unit_tasks(tasks: dict[str, TaskConfig], encoder: Encoder) -> dict[str, TaskConfig]:
    """Return the tasks that can be analyzed by unit, that the encoder supports, and whose data exist."""
    supported = {name: task for name, task in tasks.items() if set(TASKS.get(task.task).needs) <= encoder.offers}
    by_unit = {name: task for name, task in supported.items() if task.task in _BY_UNIT}
    return {name: task for name, task in by_unit.items() if is_readable(name, task)}


def is_readable(name: str, task: TaskConfig) -> bool:
    """Return whether a task of the run can be scored; missing data are only reported, because the user did not name the task."""
    try:
        TASKS.get(task.task).check(task)
    except DataError as error:
        console.print(f"skipped: {name}: {error}", soft_wrap=True)
        return False
    return True


def split_names(text: str | None) -> list[str] | None:
    """Split comma-separated names."""
    return [word for word in text.split(",") if word] if text else None


def column_titles(labels: Iterable[str]) -> list[str]:
    """Return names of checkpoints for column titles: the folder's name if names differ."""
    whole = list(labels)
    short = [Path(label).name for label in whole]
    # Two runs with one name in two folders need their folders' names.
    return short if len(set(short)) == len(short) else whole


def write_facts(path: Path | None, facts: Mapping[str, Any]) -> None:
    """Write `--json`."""
    if path is not None:
        write_whole(path, json.dumps(facts, indent=1) + "\n")
