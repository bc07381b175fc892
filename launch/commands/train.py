"""`sparo train`: recipe to finished run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evals.encoders.encoder import Encoder
from evals.encoders.loading import read_run, run_weights
from evals.interop.initial_weights import load_initial_weights
from evals.report.results_file import append, write_results
from evals.suite.evaluate import EvalOptions, result_facts
from evals.suite.suite import Suite
from evals.suite.task import check_recipe_compatible, encoder_of
from evals.tasks.result import Result, format_metric
from sparo_train.core.contracts import Objective
from sparo_train.core.disk.checkpoint_store import CheckpointStore, read_run_meta
from sparo_train.core.disk.rundir import RunDir, environment
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import CheckpointError, SparoError, StoppedError, SupersededError, TrainingError
from sparo_train.core.registries import TASKS
from sparo_train.core.world import find_world, started
from sparo_train.data.examples.samples import missing_caption_keys
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.read.sources import refuse_changed
from sparo_train.engine.optim import group_numbers
from sparo_train.models.weight_files.weights import load_into, refuse_non_finite
from sparo_train.train.build import build_engine, build_objective, build_pipeline, build_ranks
from sparo_train.train.flops import FlopCounter
from sparo_train.train.run_config import RunConfig
from sparo_train.train.state import Evaluate, Outcome
from sparo_train.train.trainer import Trainer

from ..jobs.clusters import load_cluster
from ..jobs.eval_job import submit_side
from ..jobs.snapshot import code_hash
from ..views.progress import ProgressView
from ..views.source_lines import source_lines


def train(config: RunConfig) -> Outcome:
    """Train a recipe into its run folder, from where it stands, together with the other ranks where there are any."""
    ranks = build_ranks(config, find_world())
    try:
        return _train(config, ranks)
    finally:
        ranks.close()


def _train(config: RunConfig, ranks: Ranks) -> Outcome:
    # Ranks with another seed, learning rate or checkout would otherwise train together silently.
    if ranks.size > 1:
        code = {"code": code_hash(), "versions": environment()["packages"]}
        ranks.require_equal({"recipe": config.model_dump(mode="json"), **code}, "recipe or code")
    pipeline = ranks.call_on_all(lambda: build_pipeline(config, ranks.world))
    ranks.require_equal({"data": pipeline.fingerprint}, "data")
    epoch = pipeline.plan.epoch_size
    total, steps_per_epoch = config.total_steps(epoch), config.steps_per_epoch(epoch)
    engine, objective = build_engine(config, ranks), build_objective(config)
    objective.refuse_length(total)
    # The optimizer would refuse the same, behind a folder that was made for nothing.
    group_numbers(config.optim.groups, [name for name, p in objective.named_parameters() if p.requires_grad])
    rundir = RunDir(config.folder)
    try:
        with ProgressView(config.name, rundir.path / "log.txt", silent=ranks.rank > 0) as view:
            # What refuses a start comes before the folder is written to: it may hold a run that goes on being read.
            evaluate = make_evaluate(config, objective, rundir, total, view)
            # By one rank: two that list a folder of a network disk may see two different newest ones.
            newest = ranks.rank0_broadcast(lambda: CheckpointStore(rundir.checkpoints).latest())
            start_messages: list[str] = []
            if newest is None:
                load_initial_weights(config, objective, start_messages.append)
            for line in start_messages:
                view.log(line)
            # Before tokens of a whole data set are computed for a run that is then refused; it writes nothing.
            ranks.call_on_all(lambda: rundir.refuse_changes(config))
            if pipeline.examples.reads_model:
                # Examples that look at the model need the weights that it goes on with, before the trainer reads them.
                _load_start_weights(objective, config, newest)
                pipeline.examples.ready(objective, pipeline.sources, engine.device_context, ranks, view.log)
            rundir.join(ranks.rank0_broadcast(lambda: _open_run_folder(rundir, config, pipeline)))
            for line in start_messages:  # its log is the folder's, which was not open when they were shown
                view.note(line)
            # A resumed run says where it goes on instead.
            if not any(rundir.checkpoints.glob("step-*")):
                ranks_text = f" on {ranks.size} ranks" if ranks.size > 1 else ""
                view.log(f"{total} steps of {config.batch_size} samples{ranks_text} -> {rundir.path}")
            for line in source_lines(pipeline.sources, total * config.batch_size):
                view.log(line)
            for line in config.optim.unused_keys():
                view.log(line)
            # With several ranks per machine the launcher sets the threads; a resumed run takes them from its checkpoint.
            if newest is None and ranks.size == 1 and (line := engine.device_context.choose_threads()):
                view.log(line)
            for source in pipeline.sources if ranks.rank == 0 else ():
                for key in missing_caption_keys(source):
                    view.log(
                        f"data.sources.{source.name}.captions: {key} is in none of 64 samples; the others take its share"
                    )
            try:
                # A second objective on the meta device: counting must not touch the one that is trained.
                flops = FlopCounter(lambda: build_objective(config)) if config.log.flops else None
                trainer = Trainer(
                    config, rundir, ranks, engine, objective, pipeline, total, steps_per_epoch, view, evaluate, flops
                )
                outcome = trainer.fit()
            except SupersededError:  # not even into its log
                raise
            except SparoError as error:
                view.note(f"error: {error}")
                raise
            # At the end as well as on the way: the sum is what a reader of the log looks for.
            if unusable := trainer.bad.by_reason():
                counts_text = ", ".join(f"{reason} {count:,}" for reason, count in unusable.items())
                view.log(f"samples that could not be used: {counts_text}")
            where = f"checkpoint {outcome.checkpoint}" if outcome.checkpoint is not None else "no checkpoint yet"
            view.log(f"{outcome.reason} at step {outcome.step}; {where}")
            return outcome
    finally:
        rundir.close()


def _load_start_weights(objective: Objective, config: RunConfig, newest: Path | None) -> None:
    """Those that training goes on with, where it reads them from a checkpoint later."""
    start = config.start_from
    if newest is None and start is not None and start.optimizer:
        newest = read_run(Path(start.checkpoint))[1]
    if newest is not None:
        load_into(objective, run_weights(newest), str(newest))


def _open_run_folder(rundir: RunDir, config: RunConfig, pipeline: Pipeline) -> str:
    """Claim the run folder, unless its newest checkpoint is of other data; returns the claim's token."""
    rundir.refuse_changes(config)  # first: another batch is another plan, which the data would be blamed for
    newest = CheckpointStore(rundir.checkpoints).latest()
    if newest is not None:
        with suppress(CheckpointError):  # a damaged one is the trainer's to tell, or to pass over
            refuse_changed(read_run_meta(newest)["fingerprint"], pipeline.fingerprint, str(newest))
    return rundir.open_for_training(config, 2 * config.log.heartbeat_seconds)


def exit_if_stopped(outcome: Outcome) -> None:
    """After a signal: raise StoppedError; everything is saved and the same line continues."""
    if outcome.reason.startswith("SIG"):
        stopped = StoppedError(outcome.reason, saved=outcome.checkpoint is not None)
        world = started()
        stopped.repeated = world is not None and world.rank > 0
        raise stopped


def make_evaluate(
    config: RunConfig, trained: Objective, rundir: RunDir, total: int, view: ProgressView
) -> Evaluate | None:
    """The trainer's evaluation: all of `eval.tasks`, written to RUN/evals and returned for the metrics; `eval.job` is submitted.

    Args:
        total: the run's steps; of its last evaluation the predictions are kept, too, as `sparo eval compare` needs them.
    """
    side = config.eval.job
    if not config.eval.tasks and side is None:
        return None
    check_recipe_compatible(config, trained)  # all of it now, rather than in the middle of training
    if side is not None:
        # What a job of its own would miss in hours is missed now.
        Suite(side.tasks).check()
        load_cluster(side.cluster, side.options)
    suite = Suite(config.eval.tasks)
    suite.check()
    log = view.log
    pictures = _make_picture_writer(config, rundir, log)

    def evaluate(objective: Objective, step: int, ranks: Ranks) -> dict[str, Any]:
        if side is not None and ranks.rank == 0:
            submit_side(config, side, objective.state_dict(), rundir.path, step, log)
        if not config.eval.tasks:
            return {}
        # Anew each time: an encoder holds what is derived from weights, its hash first of all.
        encoder, begin = encoder_of(objective, config), time.monotonic()
        # NaN weights still rank something; the score would look like a bad one.
        refuse_non_finite(encoder.model.state_dict(), f"step {step}", TrainingError)
        results: dict[str, Result] = {}
        for number, name in enumerate(suite.tasks, 1):
            view.phase(f"evaluating {name} {number}/{len(suite.tasks)}")
            try:
                results |= suite.run(encoder, [name], ranks)
            except SparoError:
                if results:  # the run ends with what this task says; the others' scores were had
                    log(_scores(step, results))
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
                log(f"{rundir.path / 'evals/results.jsonl'}: could not be written ({error}); tables lack step {step}")
            pictures(encoder, step)
        if step == total:  # once is enough
            for name, result in results.items():
                for remark in result.remarks():
                    log(f"{name}: {remark}")
        log(_scores(step, results))
        return {name: r.metrics for name, r in results.items()}

    return evaluate


def _scores(step: int, results: Mapping[str, Result]) -> str:
    """A line of every task's own metric."""
    parts = (f"{name} {r.headline} {format_metric(r.headline, r.value, unit=True)}" for name, r in results.items())
    return f"step {step}: " + "  ".join(parts)


def _make_picture_writer(
    config: RunConfig, rundir: RunDir, log: Callable[[str], None]
) -> Callable[[Encoder, int], None]:
    """What is drawn at an evaluation: the first task that can be, where there is one."""
    picture_tasks = [task for task in config.eval.tasks.values() if TASKS.get(task.task).pictures]
    if not picture_tasks or not config.log.pictures:
        return lambda encoder, step: None
    from .pages.training_pictures import TrainingPictures

    return TrainingPictures(config.log, picture_tasks[0], rundir.path, log).draw
