"""Arrays of small jobs: their elements, submission, the evaluation of a training step as such a job, and resubmission of a folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from evals.interop.exporting import TrainedWeights, export_weights
from evals.suite.evaluate import tasks_for
from sparo_train.core.errors import SparoError
from sparo_train.core.files import write_whole
from sparo_train.train.run_config import EvalJobConfig

from .allocation import run_in_allocation
from .cluster_files import load_cluster
from .clusters import with_one_gpu
from .fanout import FanOut
from .job import Element
from .launching import LaunchOptions, refuse_busy, submit_and_record
from .plan import LaunchPlan
from .records import launch_lock
from .snapshot import take_snapshot


def eval_elements(
    checkpoints: Sequence[str],
    tasks: Sequence[str] | None,
    data: Path | None,
    model: str | None,
    root: Path = Path("data"),
) -> list[dict[str, Any]]:
    """Return the elements for checkpoints x tasks.

    Raises:
        ConfigError: a checkpoint whose tasks are unknown, or a name that is not a task.
    """
    elements = []
    for checkpoint in checkpoints:
        for task in tasks_for(checkpoint, data, tasks, root):
            arguments = [
                "eval",
                checkpoint,
                "--tasks",
                task,
                "--root",
                str(root),
                "--json",
                "{part}",
                "--no-write-to-run",
            ]
            arguments += ["--data", str(data)] if data else []
            arguments += ["--model", model] if model else []
            elements.append({"checkpoint": checkpoint, "task": task, "arguments": arguments})
    return elements


def plan_elements(fan: FanOut, launch_options: LaunchOptions) -> LaunchPlan:
    """Return what `launch_elements` would submit."""
    cluster = _element_options(launch_options).cluster
    names = tuple(f"{fan.folder} element {number}" for number in fan.missing_elements())
    return LaunchPlan(names, cluster, fan.job_name(), fan.folder)


def _element_options(launch_options: LaunchOptions) -> LaunchOptions:
    """Return the options with one rank and at most one GPU per element."""
    return replace(launch_options, cluster=with_one_gpu(launch_options.cluster))


def launch_elements(fan: FanOut, launch_options: LaunchOptions) -> list[str]:
    """Submit missing elements as one array, with one rank and at most one GPU each; return the jobs, empty if nothing is missing."""
    launch_options = _element_options(launch_options)
    with launch_lock([fan.folder]):
        refuse_busy(fan.folder)
        code = take_snapshot(fan.folder / "code")
        missing = fan.missing_elements()
        elements = [Element(fan.arguments(number, str(fan.folder)), str(fan.folder)) for number in missing]
        jobs = submit_and_record(launch_options, elements, fan.folder, fan.job_name(), code) if elements else []
    if launch_options.cluster.kind == "allocation":
        run_in_allocation(launch_options.cluster, elements, code.path)
    return jobs


logger = logging.getLogger(__name__)


def submit_eval_job(
    job: EvalJobConfig,
    trained: TrainedWeights,
    run: Path,
    step: int,
) -> None:
    """Export to RUN/evals/side-STEP and submit a job per task; `results.json` is written there when the last one is done.

    If the cluster refuses, a message is logged and training continues; the same export can be submitted again with
    `sparo launch eval RUN/evals/side-STEP/export --data RUN/evals/side-STEP/tasks.yaml --cluster CLUSTER`.
    """
    folder = run / "evals" / f"side-{step:08d}"
    exported = export_weights(trained, folder / "export")
    # Written out, because the recipe may have changed by the time the job runs.
    tasks = {name: task.model_dump(mode="json") for name, task in job.tasks.items()}
    data = write_whole(folder / "tasks.yaml", yaml.safe_dump({"tasks": tasks}))
    try:
        fan = FanOut.make(folder, "eval", eval_elements([str(exported)], None, data, None))
        jobs = launch_elements(fan, LaunchOptions(job.cluster, load_cluster(job.cluster, job.options)))
    except SparoError as error:
        logger.warning(f"step {step}: the evaluation (eval.job) was not submitted: {error}")
    else:
        logger.info(f"step {step}: submitted the evaluation (eval.job) to {job.cluster}: job {', '.join(jobs)}")
