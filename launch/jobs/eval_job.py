"""`eval.job` of a recipe: weights of an evaluated step, handed to a job of its own while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import yaml
from torch import Tensor

from evals.interop.exporting import export_weights
from sparo_train.core.errors import SparoError
from sparo_train.core.files import write_whole
from sparo_train.train.run_config import EvalJobConfig, RunConfig

from .arrays import eval_elements, launch_elements
from .clusters import load_cluster
from .fanout import FanOut
from .launching import LaunchOptions

logger = logging.getLogger(__name__)


def submit_side(
    config: RunConfig,
    side: EvalJobConfig,
    weights: Mapping[str, Tensor],
    run: Path,
    step: int,
) -> None:
    """Export to RUN/evals/side-STEP and submit a job per task; `results.json` comes there when the last one is done.

    A refusal of the cluster is said and does not end the training; the same export can be submitted again with
    `sparo launch eval RUN/evals/side-STEP/export --data RUN/evals/side-STEP/tasks.yaml --cluster CLUSTER`.
    """
    folder = run / "evals" / f"side-{step:08d}"
    exported = export_weights(config, weights, folder / "export")
    # Written out: the recipe may be another by the time that the job runs.
    tasks = {name: task.model_dump(mode="json") for name, task in side.tasks.items()}
    data = write_whole(folder / "tasks.yaml", yaml.safe_dump({"tasks": tasks}))
    try:
        fan = FanOut.make(folder, "eval", eval_elements([str(exported)], None, data, None))
        jobs = launch_elements(fan, LaunchOptions(side.cluster, load_cluster(side.cluster, side.options)))
    except SparoError as error:
        logger.warning(f"step {step}: eval.job was not submitted: {error}")
    else:
        logger.info(f"step {step}: eval.job submitted to {side.cluster}: {', '.join(jobs)}")
