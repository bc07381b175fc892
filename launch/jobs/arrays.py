"""What the elements of a fan-out are, and their submission as one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.suite.evaluate import tasks_for

from .fanout import FanOut
from .job import Element
from .launching import LaunchOptions, refuse_busy, submit_and_record
from .snapshot import take_snapshot


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
