"""`sparo eval`: checkpoints to scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from evals.checkpoints import load_encoder, read_recipe
from evals.results import Result
from evals.suite import Suite
from sparo_train.core.config import Frozen, load_recipe, resolve
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.files import write_whole
from sparo_train.core.rundir import environment
from sparo_train.train.eval_config import EvalTaskConfig


class _Tasks(Frozen):
    tasks: dict[str, EvalTaskConfig]


def tasks_for(checkpoint: str, data: Path | None) -> dict[str, EvalTaskConfig]:
    """What to score a checkpoint on: the `tasks:` of a YAML, or `eval.tasks` of the run that it belongs to.

    Raises:
        ConfigError: neither is there.
    """
    if data is not None:
        return dict(resolve(_Tasks, load_recipe(data), str(data)).tasks)
    try:
        known = dict(read_recipe(Path(checkpoint)).eval.tasks)
    except CheckpointError:
        known = {}
    if not known:
        raise ConfigError(
            f"--data: {checkpoint} has no run folder with eval.tasks; give a YAML with `tasks:` that says what to score"
        )
    return known


def evaluate_checkpoint(
    checkpoint: str,
    known: dict[str, EvalTaskConfig],
    only: Sequence[str] | None,
    model: str | None,
    ranks: Ranks,
    report: Callable[[str], None],
    say: Callable[[str], None],
    latest: bool = True,
) -> dict[str, Result]:
    """Score one checkpoint on the `known` tasks, or on those of them named in `only`.

    `latest`: also write a run folder's evals/latest.json.
    """
    encoder = load_encoder(checkpoint, model, _device(ranks))
    if encoder.assumed:
        say(encoder.assumed)
    results = Suite(known).run(encoder, only, report, ranks)
    if latest and ranks.rank == 0 and (Path(checkpoint) / "config.yaml").is_file():
        write_results(Path(checkpoint) / "evals" / "latest.json", {"checkpoint": encoder.label}, results)
    return results


def _device(ranks: Ranks) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{ranks.world.local_rank % torch.cuda.device_count()}"


def write_results(path: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    """Results with their intervals and the environment, as one JSON file."""
    content = {**facts, "environment": environment(), "results": {name: r.as_dict() for name, r in results.items()}}
    write_whole(path, json.dumps(content, indent=1))
