"""`task: reconstruction`: how near a slot model's images are to those that it saw."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from evals.encoders.capabilities import DrawingEncoder
from evals.feature_store.feature_table import View
from evals.sets.open_set import open_set
from evals.sets.task_config import SetTaskConfig
from evals.suite.scoring import Scoring, attach_data_info
from evals.suite.task import Task
from evals.tasks.objects import reconstruction
from evals.tasks.result import Result
from sparo_train.core.config import field

from .mask_task import conditional_incompatibility


class ReconstructionTaskConfig(SetTaskConfig):
    """Images with `.mask.png`, whose masks are not looked at; so that one set serves both tasks."""

    task: Literal["reconstruction"] = field("reconstruction", "a row of sparo.tasks")


def run_reconstruction(scoring: Scoring, task: ReconstructionTaskConfig) -> Result:
    """MSE and PSNR of what is drawn; of features, the MSE alone."""
    source = open_set(task, "masks")
    encoder = scoring.encoder
    assert isinstance(encoder, DrawingEncoder)  # what offers `drawing`
    view = View(f"squared error of what is drawn: {encoder.draws}", encoder.squared_error, measured=True)
    (features,) = scoring.features([source], task.workers, view=view)

    def score() -> Result:
        errors = np.concatenate([block[:, 0].numpy() for block in features.blocks(4096)])
        return reconstruction.score(errors, encoder.numbers, encoder.draws == "pixels")

    return attach_data_info(scoring.ranks.rank0_broadcast(score), features, source, {"drawn": encoder.draws})


def _incompatibility(task: ReconstructionTaskConfig, encoder: Any) -> str | None:
    if not getattr(encoder, "frame_scores", ("mse",)):
        return f"root: this model draws {encoder.draws}, and a still has none to compare with; score clips (task: video_masks)"
    return conditional_incompatibility(encoder)


RECONSTRUCTION = Task(
    ReconstructionTaskConfig,
    run_reconstruction,
    lambda task: open_set(task, "masks").check(),
    needs=("drawing",),
    facts="masks",
    incompatibility=_incompatibility,
)
