"""Task of regression: a number per image from frozen encodings, by ridge regression."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch.nn import functional as F

from sparo_train.core.config import field

from ..feature_store.feature_table import Features
from ..sets.open_set import open_labelled
from ..sets.task_config import LabelledTaskConfig
from ..tasks import regression
from ..tasks.result import Result
from .scoring import Scoring, attach_data_info, training_details
from .task import Task


class RegressionTaskConfig(LabelledTaskConfig):
    """Ridge regression of the numbers in `columns.target` on the encodings, which are standardised."""

    task: Literal["regression"] = field("regression", "Kind of the task: an entry of sparo.tasks.")
    normalize: bool = field(False, "Scale encodings to norm one before standardising.")
    headline: Literal["r2", "mae", "rmse", "spearman"] = field("r2", "Metric that tables show.")


def run_regression(scoring: Scoring, task: RegressionTaskConfig) -> Result:
    """Fit on one rank, while the others wait for the result."""
    train_set, test_set = open_labelled(task, "target")
    transform = scoring.encoder.transform_with_resize(task.resize)
    train, test = scoring.features([train_set, test_set], task.workers, transform)

    def encodings(features: Features) -> np.ndarray:
        rows = features.in_memory()
        return (F.normalize(rows, dim=-1) if task.normalize else rows).numpy()

    def fit() -> Result:
        numbers = [np.array(features.facts, np.float64) for features in (train, test)]
        found = regression.score(
            encodings(train), numbers[0], encodings(test), numbers[1], train_set.groups, test_set.groups
        )
        return found.with_headline(task.headline)

    options = {"normalize": task.normalize, **training_details(train_set, test_set, task.resize)}
    return attach_data_info(scoring.ranks.rank0_broadcast(fit), test, test_set, options)


def _check(task: RegressionTaskConfig) -> None:
    for source in open_labelled(task, "target"):
        source.check()


REGRESSION = Task(RegressionTaskConfig, run_regression, _check, facts="target")
