"""Evaluation suites: encode the tasks' inputs, score them, and collect results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import DataError, SparoError, UnexpectedError
from sparo_train.core.registries import TASKS
from sparo_train.core.world import World

from ..encoders.encoder import Encoder
from ..feature_store.features import FeatureStore
from ..sets.open_set import open_set
from ..sets.task_config import SetTaskConfig, TaskConfig
from ..tasks.result import Result
from .scoring import PartsMissingError, Scoring
from .task import check_compatible, select_tasks

_SINGLE_PROCESS = Ranks(World(), "gloo", 0.0)


class Suite:
    """Several evaluation sets, which can be scored repeatedly.

    Args:
        tasks: by name, as in a recipe's `eval.tasks`.
        store: store of features; default: none.
    """

    def __init__(self, tasks: Mapping[str, TaskConfig], store: FeatureStore | None = None):
        self.tasks, self.store = dict(tasks), store or FeatureStore()

    def check(self) -> None:
        """Raise `DataError` if a set lacks a file that its task needs; it names all such sets."""
        errors: list[SparoError] = []
        for task in self.tasks.values():
            try:
                TASKS.get(task.task).check(task)
            except SparoError as error:
                errors.append(error)
        if len(errors) > 1:
            lines = "\n  ".join(map(str, errors))
            raise DataError(f"{len(errors)} of {len(self.tasks)} sets cannot be scored:\n  {lines}")
        if errors:
            raise errors[0]

    def sizes(self) -> dict[str, int]:
        """Return the number of images of each task that has one set, for an estimate of the time; 0 for a damaged set, which `check` reports."""
        sizes = {}
        for name, task in self.tasks.items():
            if isinstance(task, SetTaskConfig):
                try:
                    sizes[name] = len(open_set(task, TASKS.get(task.task).facts))
                except SparoError:
                    sizes[name] = 0
        return sizes

    def run(
        self,
        encoder: Encoder,
        only: Sequence[str] | None = None,
        ranks: Ranks = _SINGLE_PROCESS,
        part: tuple[int, int] | None = None,
    ) -> dict[str, Result]:
        """Score `encoder` on the tasks named in `only` (default: all).

        Args:
            encoder, only: encoder and tasks.
            ranks: ranks that score together; each encodes its share of the images, and all return the same results.
            part: (i, n): only encode the i-th of n shares; tasks whose other shares are missing are not in the results.
        """
        tasks, out = select_tasks(self.tasks, only), {}
        for name, task in tasks.items():
            check_compatible(name, task, encoder)
        for name, task in tasks.items():
            try:
                out[name] = _score_task(Scoring(name, encoder, self.store, ranks, part), task)
            except PartsMissingError:
                continue
        return out


class TaskError(SparoError):
    """Error of a task itself, which does not prevent scoring other tasks or saving a training."""


def _score_task(scoring: Scoring, task: TaskConfig) -> Result:
    """Return a task's result with plain numbers, for files and tables."""
    try:
        raw_result: Result = TASKS.get(task.task).run(scoring, task)
        metrics = {name: float(value) for name, value in raw_result.metrics.items()}
        intervals = {name: (float(low), float(high)) for name, (low, high) in raw_result.intervals.items()}
        counts = {name: int(value) for name, value in raw_result.counts.items()}
        result = raw_result._replace(
            metrics=metrics, intervals=intervals, counts=counts, chance=float(raw_result.chance), n=int(raw_result.n)
        )
        json.dumps(result.options)  # report here, with the task's name, what files cannot store
        if result.headline not in metrics:
            raise KeyError(
                f"headline {result.headline!r} is not one of this task's metrics: {', '.join(metrics) or 'none'}"
            )
    except UnexpectedError as error:  # of rank 0, and all ranks raise it
        failed = TaskError(f"{scoring.name}: task={task.task} failed ({error})")
        failed.on_all_ranks, failed.repeated = error.on_all_ranks, error.repeated
        raise failed from error
    except SparoError:
        raise
    except Exception as error:  # a plug-in's task may fail in any way
        raise TaskError(f"{scoring.name}: task={task.task} failed ({UnexpectedError.from_error(error)})") from error
    return result
