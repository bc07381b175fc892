"""Data sets times tasks: encode what a task needs, hand the features over, collect results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparo_train.core.distributed import Ranks, World
from sparo_train.core.errors import DataError, did_you_mean
from sparo_train.train.eval_config import EvalTaskConfig, LabelledTaskConfig, SetTaskConfig, ZeroshotTaskConfig

from .encoders import Encoder
from .features import FeatureStore
from .results import Result
from .runners import RUNNERS
from .scoring import PartsMissingError, Scoring
from .sets.opening import open_labelled, open_set

_ALONE = Ranks(World(), "gloo", 0.0)


class Suite:
    """Several evaluation sets, scored as often as asked.

    Args:
        tasks: by name, as in a recipe's `eval.tasks`.
        store: where features are kept; default: nowhere.
    """

    def __init__(self, tasks: Mapping[str, EvalTaskConfig], store: FeatureStore | None = None):
        self.tasks, self.store = dict(tasks), store or FeatureStore()

    def check(self) -> None:
        """Raise `DataError` now where a set lacks a file that its task needs."""
        for task in self.tasks.values():
            if isinstance(task, SetTaskConfig):
                found = open_set(task, task.task)
                found.check()
                if isinstance(task, ZeroshotTaskConfig):
                    found.classnames()
            else:
                assert isinstance(task, LabelledTaskConfig)
                open_labelled(task)

    def run(
        self,
        encoder: Encoder,
        only: Sequence[str] | None = None,
        ranks: Ranks = _ALONE,
        part: tuple[int, int] | None = None,
    ) -> dict[str, Result]:
        """Score `encoder` on the tasks named in `only` (default: all).

        Args:
            ranks: those that score together; each encodes its share of the images, and all return the same results.
            part: (i, n): encode the i-th of n shares only; tasks whose other shares are missing are left out of the results.
        """
        for name in only or ():
            if name not in self.tasks:
                raise DataError(f"--tasks {name}: {did_you_mean(name, self.tasks)}")
        out = {}
        for name, task in self.tasks.items():
            if only and name not in only:
                continue
            try:
                out[name] = RUNNERS[task.task](Scoring(name, encoder, self.store, ranks, part), task)
            except PartsMissingError:
                continue
        return out
