"""`task: objects`: how well a model lists the objects of a set whose scenes say where each is and what it is."""

from __future__ import annotations

from typing import Literal

import numpy as np

from evals.encoders.capabilities import ObjectsEncoder
from evals.feature_store.feature_table import View
from evals.sets.objects import REACH, WIDTH, attribute_columns
from evals.sets.open_set import open_set
from evals.sets.task_config import SetTaskConfig
from evals.suite.scoring import Scoring, attach_data_info
from evals.suite.task import Task
from evals.tasks.objects import average_precision
from evals.tasks.result import Result
from sparo_train.core.config import field
from sparo_train.core.errors import DataError


class ObjectsTaskConfig(SetTaskConfig):
    """Images whose `.json` has `objects` with position, size, material, shape and color."""

    task: Literal["objects"] = field("objects", "a row of sparo.tasks")
    match: average_precision.Match = field(
        "nearest", "an object that is taken stays in the way (Locatello et al. 2020), or not: dspn (Zhang et al. 2022)"
    )


def run_objects(scoring: Scoring, task: ObjectsTaskConfig) -> Result:
    """AP at six distances, of all images' predictions together."""
    source = open_set(task, "objects")
    encoder = scoring.encoder
    assert isinstance(encoder, ObjectsEncoder)  # what offers `objects`
    (features,) = scoring.features([source], task.workers, view=View("objects listed", encoder.objects, measured=True))

    def score() -> Result:
        predicted = [row.view(-1, WIDTH).numpy() for block in features.blocks(256) for row in block]
        # An empty list is an image without objects, which has a place in the count all the same.
        true = [np.asarray(fact).reshape(-1, WIDTH) for fact in features.facts]
        if not sum(map(len, true)):
            raise DataError(f"{source.root}: not one image has an object; average precision needs some")
        return average_precision.score(predicted, true, attribute_columns(), 2 * REACH, task.match)

    options = {"slots": scoring.encoder.slots, "distances": "world units, positions within 3"}
    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, options)


OBJECTS = Task(
    ObjectsTaskConfig, run_objects, lambda task: open_set(task, "objects").check(), needs=("objects",), facts="objects"
)
