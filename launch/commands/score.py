"""`sparo eval`: score several checkpoints, print and store the results; a failing checkpoint does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from evals.encoders.loading import refuse_absent
from evals.report.results_file import refuse_unwritable, write_results
from evals.sets.task_config import TaskConfig
from evals.suite.catalogue import suite_tasks_below
from evals.suite.eval_options import EvalOptions
from evals.suite.evaluate import evaluate_checkpoint, tasks_for
from evals.suite.suite import Suite
from evals.tasks.result import Result
from sparo_train.core.accelerator import collectives
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, LostRankError, SparoError, StoppedError
from sparo_train.core.world import find_world

from ..recipes import find_recipe
from ..views.results_table import Encoding, results_table
from ..views.suite_table import SuiteProgress
from ..views.terminal import out
from .suite import print_suite, suite_metrics

logger = logging.getLogger(__name__)

TasksByCheckpoint = Mapping[str, Mapping[str, TaskConfig]]


def find_tasks(
    checkpoints: Sequence[str], names: str | None, suite: str | None, data: Path | None, root: Path
) -> dict[str, dict[str, TaskConfig]]:
    """Return the tasks of each checkpoint: those of a suite below `root`, or those of `tasks_for`.

    Raises:
        ConfigError: a suite together with names or a file, or one of them is unknown.
        CheckpointError: a checkpoint does not exist.
    """
    if suite is None:
        only, recipe = names.split(",") if names else None, find_recipe(data) if data else None
        return {checkpoint: tasks_for(checkpoint, recipe, only, root) for checkpoint in checkpoints}
    for option, value in (("--tasks", names), ("--data", data)):
        if value is not None:
            raise ConfigError(f"{option} {value}: cannot be combined with --suite {suite}. Remove one of them.")
    for checkpoint in checkpoints:
        refuse_absent(checkpoint)
    return dict.fromkeys(checkpoints, suite_tasks_below(suite, root))


def score_checkpoints(
    checkpoints: Sequence[str],
    tasks_by_checkpoint: TasksByCheckpoint,
    eval_options: EvalOptions,
    json_file: Path | None,
    suite: str | None = None,
) -> None:
    """Score each checkpoint on its tasks, by all ranks together; results are written before they are printed.

    Args:
        checkpoints, tasks_by_checkpoint, eval_options: checkpoints, their tasks, and options.
        json_file: file for all results.
        suite: name of the suite that the tasks are of, whose table is printed instead.

    Raises:
        ConfigError: a results folder is not writable, reported before anything is scored.
        SparoError: the error of a checkpoint; the scores of the others are printed and stored.
    """
    if json_file is not None:
        if json_file.is_dir():
            raise ConfigError(f"--json {json_file}: is a folder. Name a file.")
        refuse_unwritable(json_file.parent, f"--json {json_file}")
    if eval_options.results is not None:
        refuse_unwritable(eval_options.results, "--results")
    # An hour, because a rank may wait for another's encoding of a whole set.
    ranks = Ranks(find_world(), collectives(torch.device(eval_options.device)), 3600.0)
    try:
        seconds: dict[str, float] = {}
        results_by_checkpoint, failed = _score_all(
            checkpoints, tasks_by_checkpoint, eval_options, ranks, suite, seconds
        )
        if ranks.rank == 0:
            _print_results(results_by_checkpoint, eval_options, json_file, suite, seconds)
        if failed is not None:
            raise failed
    finally:
        ranks.close()


def _score_all(
    checkpoints: Sequence[str],
    tasks_by_checkpoint: TasksByCheckpoint,
    eval_options: EvalOptions,
    ranks: Ranks,
    suite: str | None,
    seconds: dict[str, float],
) -> tuple[dict[str, dict[str, Result]], SparoError | None]:
    results_by_checkpoint: dict[str, dict[str, Result]] = {}
    failed: SparoError | None = None

    # A checkpoint given twice would be one column.
    for checkpoint in dict.fromkeys(checkpoints):
        name, results = Path(checkpoint).name, dict[str, Result]()
        tasks = dict(tasks_by_checkpoint[checkpoint])
        try:
            if suite is None:
                with Encoding(checkpoint, ranks.rank > 0) as report:
                    evaluate_checkpoint(checkpoint, tasks, eval_options, ranks, report, results)
            else:
                _score_suite(checkpoint, tasks, eval_options, ranks, results, seconds, suite_metrics(suite))
        except (LostRankError, StoppedError):
            raise
        except SparoError as error:
            if (
                ranks.size > 1 and not error.on_all_ranks
            ):  # the other ranks wait at another operation, and could not continue with the next checkpoint
                raise
            if failed is not None and not failed.repeated:
                logger.error(f"error: {failed}")  # the last one is raised at the end
            failed = error
            if not results:
                continue
        # Two checkpoints with one name are distinguished by their full paths.
        results_by_checkpoint[name if name not in results_by_checkpoint else checkpoint] = results
    return results_by_checkpoint, failed


def _score_suite(
    checkpoint: str,
    tasks: dict[str, TaskConfig],
    eval_options: EvalOptions,
    ranks: Ranks,
    results: dict[str, Result],
    seconds: dict[str, float],
    metrics: Mapping[str, str | None],
) -> None:
    """Score a checkpoint with one bar over all sets; `seconds` receives the time of each task."""
    sizes = ranks.call_on_all(Suite(tasks).sizes)
    limit = eval_options.limit
    share = {name: -(-(size if limit is None else min(limit, size)) // ranks.size) for name, size in sizes.items()}
    with SuiteProgress(Path(checkpoint).name, share, metrics, ranks.rank > 0) as progress:

        def add_score(name: str, spent: float) -> None:
            seconds[name] = seconds.get(name, 0.0) + spent
            progress.add_score(name, results[name], spent)

        evaluate_checkpoint(checkpoint, tasks, eval_options, ranks, progress.encoding, results, add_score)


def _print_results(
    results_by_checkpoint: Mapping[str, dict[str, Result]],
    eval_options: EvalOptions,
    json_file: Path | None,
    suite: str | None,
    seconds: Mapping[str, float],
) -> None:
    unwritten: OSError | None = None
    if json_file is not None and any(results_by_checkpoint.values()):
        facts = (
            {"slots": str(eval_options.slots) if isinstance(eval_options.slots, Path) else eval_options.slots}
            if eval_options.slots
            else {}
        )
        try:
            write_results(
                json_file,
                facts,
                {f"{c}/{t}": r for c, by_task in results_by_checkpoint.items() for t, r in by_task.items()},
            )
        except OSError as error:  # a disk that filled up meanwhile: only the table is left
            unwritten = error
    if suite is not None and any(results_by_checkpoint.values()):
        print_suite(suite, results_by_checkpoint, seconds)
    elif any(results_by_checkpoint.values()):
        slots_note = f", slots {eval_options.slots_named} of the images" if eval_options.slots else ""
        out.print_wide(results_table(results_by_checkpoint, f"per cent with 95 % intervals{slots_note}"))
    if unwritten is not None:
        raise ConfigError(f"--json {json_file}: could not be written ({unwritten}). The table above has the scores.")
