"""`sparo train`: train a recipe with progress, evaluation tasks and initial weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from evals.encoders.encoder import Encoder
from evals.interop.exporting import TrainedWeights
from evals.interop.initial_weights import load_initial_weights
from evals.report.results_file import append, write_results
from evals.suite.eval_options import EvalOptions
from evals.suite.evaluate import result_facts
from evals.suite.suite import Suite
from evals.suite.task import build_encoder, check_recipe_compatible
from evals.tasks.result import Result, format_metric
from sparo_train.core.contracts import Objective
from sparo_train.core.disk.rundir import RunDir
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import SparoError, StoppedError, TrainingError
from sparo_train.core.registries import TASKS
from sparo_train.core.world import launched_world
from sparo_train.models.weight_files.weights import refuse_non_finite
from sparo_train.train.fit import Callbacks, fit
from sparo_train.train.run_config import LogConfig, RunConfig
from sparo_train.train.state import Display, Evaluate, Outcome, Run

from ..jobs.arrays import submit_eval_job
from ..jobs.cluster_files import load_cluster
from ..jobs.snapshot import code_hash
from ..views.progress import ProgressView

logger = logging.getLogger(__name__)


def train(config: RunConfig, ranks: Ranks | None = None) -> Outcome:
    """Train a recipe in its run folder, from its newest checkpoint if it has one; with progress, `eval.tasks` and `start_from`.

    Args:
        config: the resolved recipe.
        ranks: the processes that train together, already joined; None: those in the environment.
    """
    callbacks = Callbacks(ProgressView, load_initial_weights, lambda: {"code": code_hash()})
    return fit(config, make_evaluate, callbacks, ranks)


def exit_if_stopped(outcome: Outcome) -> None:
    """Raise StoppedError after a signal; everything is saved and the same command continues."""
    if outcome.reason.startswith("SIG"):
        stopped = StoppedError(outcome.reason, saved=outcome.checkpoint is not None)
        world = launched_world()
        stopped.repeated = world is not None and world.rank > 0
        raise stopped


def make_evaluate(run: Run, display: Display) -> Evaluate | None:
    """Return the trainer's evaluation function: it scores all `eval.tasks`, writes RUN/evals, returns the metrics, and submits `eval.job`.

    Predictions of the last evaluation are stored, too, for `sparo eval compare`.
    """
    config, rundir, total = run.config, run.rundir, run.total_steps
    side = config.eval.job
    if not config.eval.tasks and side is None:
        return None
    check_recipe_compatible(config, run.objective)  # all of it now, rather than in the middle of training
    if side is not None:
        # Check now; a separate job would only notice in hours.
        Suite(side.tasks).check()
        load_cluster(side.cluster, side.options)
    suite = Suite(config.eval.tasks)
    suite.check()
    pictures = _make_picture_writer(config.eval.tasks, config.log, rundir)

    def evaluate(objective: Objective, step: int, ranks: Ranks) -> dict[str, Any]:
        if side is not None and ranks.rank == 0:
            submit_eval_job(side, TrainedWeights.from_checkpoint(config, objective.state_dict()), rundir.path, step)
        if not config.eval.tasks:
            return {}
        # A new encoder each time, because it caches values derived from weights, such as their hash.
        encoder, begin = build_encoder(objective, config), time.monotonic()
        # NaN weights still produce a ranking, whose score would merely look bad.
        refuse_non_finite(encoder.model.state_dict(), f"step {step}", TrainingError)
        results: dict[str, Result] = {}
        for number, name in enumerate(suite.tasks, 1):
            display.phase(f"evaluating {name} {number}/{len(suite.tasks)}")
            try:
                results |= suite.run(encoder, [name], ranks)
            except SparoError:
                if results:  # the run ends with this task's error; the others' scores are stored
                    logger.info(_scores(step, results))
                raise
        if ranks.rank == 0:
            # A run that was taken over writes nothing more to the folder.
            rundir.lease.check()
            write_results(rundir.path / "evals" / f"step-{step:08d}.json", {"step": step}, results)
            # The name of the future checkpoint, by which cards and tables find the weights.
            encoder.label = str(rundir.checkpoints / f"step-{step:08d}")
            facts = {"step": step, **result_facts(encoder, EvalOptions(), time.monotonic() - begin)}
            try:
                for name, result in results.items():
                    append(rundir.path / "evals", str(config.folder), name, result, facts, predictions=step == total)
            except OSError as error:  # the scores are in metrics.jsonl and in the step's file
                logger.warning(
                    f"{rundir.path / 'evals/results.jsonl'}: could not be written ({error}). "
                    f"Tables of results will lack step {step}; metrics.jsonl has its scores."
                )
            pictures(encoder, step)
        if step == total:  # report it once
            for name, result in results.items():
                for remark in result.remarks():
                    logger.warning(f"{name}: {remark}")
        logger.info(_scores(step, results))
        return {name: r.metrics for name, r in results.items()}

    return evaluate


def _scores(step: int, results: Mapping[str, Result]) -> str:
    """Return a line with every task's headline."""
    parts = (f"{name} {r.headline} {format_metric(r.headline, r.value, unit=True)}" for name, r in results.items())
    return f"step {step}: " + "  ".join(parts)


def _make_picture_writer(tasks: Mapping[str, Any], log: LogConfig, rundir: RunDir) -> Callable[[Encoder, int], None]:
    """Return the writer of pictures for the first task that has any, or None."""
    picture_tasks = [task for task in tasks.values() if TASKS.get(task.task).pictures]
    if not picture_tasks or not log.pictures:
        return lambda encoder, step: None
    from .pages.training_pictures import TrainingPictures

    return TrainingPictures(log, picture_tasks[0], rundir.path).draw
