"""Arrays of small jobs: their elements, their submission, the evaluation of a training step as such a job, and submitting a folder again."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from evals.interop.exporting import TrainedWeights, export_weights
from evals.suite.evaluate import tasks_for
from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError, SparoError
from sparo_train.core.files import write_whole
from sparo_train.train.run_config import EvalJobConfig

from .clusters import ClusterConfig, load_cluster, with_options
from .fanout import FanOut
from .job import Element
from .launching import LaunchOptions, refuse_busy, submit_and_record
from .records import Records
from .snapshot import Snapshot, take_snapshot


def resubmit(folder: Path, options: Sequence[str]) -> list[str]:
    """The newest submission once more, from where it was made, with the code that it had; returns the jobs.

    Raises:
        ConfigError: nothing was launched there, a job is not over, its code is gone, or other ranks are asked for.
    """
    last = Records(folder).last()
    if last is None:
        raise ConfigError(f"{folder}: no job was launched there; use `sparo launch train`")
    refuse_busy(folder)
    name = f"the cluster of {folder}"
    cluster = resolve(ClusterConfig, with_options(last["cluster"], options), name)
    if cluster.ranks != resolve(ClusterConfig, last["cluster"], name).ranks:
        raise ConfigError(f"{folder}: other ranks need a resolved recipe of their own; `sparo launch train` makes it")
    code = Snapshot(Path(last["code"]), last["commit"], last["changed"])
    if not code.path.is_dir():
        raise ConfigError(f"{code.path}: the code that ran there is gone; `sparo launch train` takes a new copy")
    arguments = [tuple(args) for args in last["arguments"]]
    if (folder / "plan.json").exists():
        fan = FanOut(folder)
        arguments = [fan.arguments(number, last["folder"]) for number in fan.missing()]
    here = Path.cwd()
    # Relative paths of the recipe meant that folder.
    os.chdir(last["cwd"])
    try:
        elements = [Element(words, last["folder"]) for words in arguments]
        home = Path(last["folder"])
        return (
            submit_and_record(LaunchOptions(last["on"], cluster, last["parallel"]), elements, home, last["name"], code)
            if elements
            else []
        )
    finally:
        os.chdir(here)


def eval_elements(
    checkpoints: Sequence[str],
    tasks: Sequence[str] | None,
    data: Path | None,
    model: str | None,
    root: Path = Path("data"),
) -> list[dict[str, Any]]:
    """Checkpoints x tasks.

    Raises:
        ConfigError: a checkpoint whose tasks cannot be told, or a task that is none of them.
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


def launch_elements(fan: FanOut, launch_options: LaunchOptions) -> list[str]:
    """Submit what is missing as one array, one rank and one GPU at most for each; returns the jobs, none where nothing is."""
    resources = {
        "nodes": 1,
        "tasks_per_node": 1,
        "starter": "srun",
        "gpus_per_node": min(1, launch_options.cluster.gpus_per_node),
    }
    launch_options = replace(launch_options, cluster=launch_options.cluster.model_copy(update=resources))
    refuse_busy(fan.folder)
    code = take_snapshot(fan.folder / "code")
    missing = fan.missing()
    elements = [Element(fan.arguments(number, str(fan.folder)), str(fan.folder)) for number in missing]
    return submit_and_record(launch_options, elements, fan.folder, fan.folder.name, code) if elements else []


logger = logging.getLogger(__name__)


def submit_eval_job(
    job: EvalJobConfig,
    trained: TrainedWeights,
    run: Path,
    step: int,
) -> None:
    """Export to RUN/evals/side-STEP and submit a job per task; `results.json` comes there when the last one is done.

    A refusal of the cluster is said and does not end the training; the same export can be submitted again with
    `sparo launch eval RUN/evals/side-STEP/export --data RUN/evals/side-STEP/tasks.yaml --cluster CLUSTER`.
    """
    folder = run / "evals" / f"side-{step:08d}"
    exported = export_weights(trained, folder / "export")
    # Written out: the recipe may be another by the time that the job runs.
    tasks = {name: task.model_dump(mode="json") for name, task in job.tasks.items()}
    data = write_whole(folder / "tasks.yaml", yaml.safe_dump({"tasks": tasks}))
    try:
        fan = FanOut.make(folder, "eval", eval_elements([str(exported)], None, data, None))
        jobs = launch_elements(fan, LaunchOptions(job.cluster, load_cluster(job.cluster, job.options)))
    except SparoError as error:
        logger.warning(f"step {step}: eval.job was not submitted: {error}")
    else:
        logger.info(f"step {step}: eval.job submitted to {job.cluster}: {', '.join(jobs)}")
