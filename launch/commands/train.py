"""`sparo train`: recipe to finished run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from evals.encoders.encoder import Encoder
from evals.interop.exporting import TrainedWeights
from evals.interop.initial_weights import load_initial_weights
from evals.report.results_file import append, write_results
from evals.suite.evaluate import EvalOptions, result_facts
from evals.suite.suite import Suite
from evals.suite.task import check_recipe_compatible, encoder_of
from evals.tasks.result import Result, format_metric
from sparo_train.core.contracts import Objective
from sparo_train.core.disk.rundir import RunDir
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import SparoError, StoppedError, TrainingError
from sparo_train.core.registries import TASKS
from sparo_train.core.world import launched_world
from sparo_train.models.weight_files.weights import refuse_non_finite
from sparo_train.train.fit import Callbacks, Run, fit
from sparo_train.train.run_config import LogConfig, RunConfig
from sparo_train.train.state import Display, Evaluate, Outcome

from ..jobs.arrays import submit_eval_job
from ..jobs.clusters import load_cluster
from ..jobs.snapshot import code_hash
from ..views.progress import ProgressView

logger = logging.getLogger(__name__)


def train(config: RunConfig, ranks: Ranks | None = None) -> Outcome:
    """Train a recipe into its run folder, from its newest checkpoint if it has one; with progress, `eval.tasks` and `start_from`.

    Args:
        ranks: the processes that train together, already joined; None: those that the environment describes.
    """
    callbacks = Callbacks(ProgressView, load_initial_weights, lambda: {"code": code_hash()})
    return fit(config, make_evaluate, callbacks, ranks)


def exit_if_stopped(outcome: Outcome) -> None:
    """After a signal: raise StoppedError; everything is saved and the same line continues."""
    if outcome.reason.startswith("SIG"):
        stopped = StoppedError(outcome.reason, saved=outcome.checkpoint is not None)
        world = launched_world()
        stopped.repeated = world is not None and world.rank > 0
        raise stopped


def make_evaluate(run: Run, display: Display) -> Evaluate | None:
    """Return the trainer's evaluation: all of `eval.tasks`, written to RUN/evals and returned for the metrics; `eval.job` is submitted.

    Predictions of the last evaluation are kept, too, as `sparo eval compare` needs them.
    """
    config, rundir, total = run.config, run.rundir, run.total_steps
    side = config.eval.job
    if not config.eval.tasks and side is None:
        return None
    check_recipe_compatible(config, run.objective)  # all of it now, rather than in the middle of training
    if side is not None:
        # What a job of its own would miss in hours is missed now.
        Suite(side.tasks).check()
        load_cluster(side.cluster, side.options)
    suite = Suite(config.eval.tasks)
    suite.check()
    pictures = _make_picture_writer(config.eval.tasks, config.log, rundir)

    def evaluate(objective: Objective, step: int, ranks: Ranks) -> dict[str, Any]:
        if side is not None and ranks.rank == 0:
            submit_eval_job(side, TrainedWeights.of(config, objective.state_dict()), rundir.path, step)
        if not config.eval.tasks:
            return {}
        # Anew each time: an encoder holds what is derived from weights, its hash first of all.
        encoder, begin = encoder_of(objective, config), time.monotonic()
        # NaN weights still rank something; the score would look like a bad one.
        refuse_non_finite(encoder.model.state_dict(), f"step {step}", TrainingError)
        results: dict[str, Result] = {}
        for number, name in enumerate(suite.tasks, 1):
            display.phase(f"evaluating {name} {number}/{len(suite.tasks)}")
            try:
                results |= suite.run(encoder, [name], ranks)
            except SparoError:
                if results:  # the run ends with what this task says; the others' scores were had
                    logger.info(_scores(step, results))
                raise
        if ranks.rank == 0:
            # A run that was taken over writes nothing more into the other's folder.
            rundir.lease.check()
            write_results(rundir.path / "evals" / f"step-{step:08d}.json", {"step": step}, results)
            # As the step will be called on disk: cards and tables find the weights by it.
            encoder.label = str(rundir.checkpoints / f"step-{step:08d}")
            facts = {"step": step, **result_facts(encoder, EvalOptions(), time.monotonic() - begin)}
            try:
                for name, result in results.items():
                    append(rundir.path / "evals", str(config.folder), name, result, facts, predictions=step == total)
            except OSError as error:  # the scores are in metrics.jsonl and in the step's file
                logger.warning(
                    f"{rundir.path / 'evals/results.jsonl'}: could not be written ({error}); tables lack step {step}"
                )
            pictures(encoder, step)
        if step == total:  # once is enough
            for name, result in results.items():
                for remark in result.remarks():
                    logger.warning(f"{name}: {remark}")
        logger.info(_scores(step, results))
        return {name: r.metrics for name, r in results.items()}

    return evaluate


def _scores(step: int, results: Mapping[str, Result]) -> str:
    """A line of every task's own metric."""
    parts = (f"{name} {r.headline} {format_metric(r.headline, r.value, unit=True)}" for name, r in results.items())
    return f"step {step}: " + "  ".join(parts)


def _make_picture_writer(tasks: Mapping[str, Any], log: LogConfig, rundir: RunDir) -> Callable[[Encoder, int], None]:
    """Return what draws pictures at an evaluation: the first task that has any; nothing without one."""
    picture_tasks = [task for task in tasks.values() if TASKS.get(task.task).pictures]
    if not picture_tasks or not log.pictures:
        return lambda encoder, step: None
    from .pages.training_pictures import TrainingPictures

    return TrainingPictures(log, picture_tasks[0], rundir.path).draw
