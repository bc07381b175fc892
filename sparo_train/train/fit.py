"""`fit`: train a recipe to the end, on all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.config import resolve
from ..core.contracts import Objective
from ..core.disk.checkpoint_store import CheckpointStore, newest_step, read_part, read_run_meta
from ..core.disk.rundir import RunDir, package_versions
from ..core.distributed import Ranks
from ..core.errors import CheckpointError, ConfigError, SparoError, SupersededError
from ..core.logs import FILE_ONLY, RunLog, logging_to
from ..core.torch_settings import standard_settings
from ..core.world import find_world
from ..data.examples.samples import missing_caption_keys
from ..data.read.loader import Pipeline
from ..data.read.plan import repetition_warning, source_shares
from ..data.sources.base import Source
from ..data.sources.fingerprint import refuse_changed
from ..data.sources.folder import left_out_text
from ..engine.optim import group_numbers
from .build import build_engine, build_objective, build_pipeline, build_ranks
from .meter import FlopCounter
from .run_config import RunConfig, StartConfig
from .state import Display, Evaluate, NoDisplay, Outcome, Run
from .trainer import Trainer

_NAMED = 5


def source_lines(sources: Sequence[Source], samples: int) -> Iterator[str]:
    """Return one line per source with its share, size and passes, and lines for losses.

    Args:
        sources: sources with their weights.
        samples: number of samples that the whole run reads.
    """
    # Use the plan's own arithmetic, so that the lines match what will be read.
    read = source_shares(*_totals_and_weights(sources), samples)
    for source, (share, passes) in zip(sources, read, strict=True):
        yield f"data {source.name}: {share:.1%} of the samples read; {source.samples:,} samples, {passes:.2f} passes"
        if left_out := getattr(source.storages[0], "left_out", {}):
            yield f"data {source.name}: skipped files that are not readable images: {left_out_text(left_out)}"
        broken = source.incomplete_storages()
        for damage in broken[:_NAMED]:
            yield f"data {source.name}: {damage.url}: {damage.reason}, about {damage.lost_samples:,} samples lost"
        if len(broken) > _NAMED:
            yield f"data {source.name}: {len(broken) - _NAMED} more shards are incomplete; `sparo data check` lists them"


def _totals_and_weights(sources: Sequence[Source]) -> tuple[list[int], list[float]]:
    return [source.samples for source in sources], [source.config.weight for source in sources]


logger = logging.getLogger(__name__)


# Makes the function that scores the objective at evaluations, or returns None. Raises `ConfigError` for tasks that
# cannot be scored.
MakeEvaluate = Callable[[Run, Display], Evaluate | None]


def refuse_initial_weights(config: Any, start: StartConfig | None, objective: Objective) -> None:
    """Initialise from the seed only. Raises `ConfigError` if the recipe names weights, which only `sparo.fit` and `sparo train` load."""
    if start is not None and not start.optimizer:
        raise ConfigError("start_from: needs callbacks.initial_weights, which sparo.fit sets. Call sparo.fit.")
    for key in ("vision", "text"):
        if getattr(getattr(getattr(config, "model", None), key, None), "init_from", None) is not None:
            raise ConfigError(
                f"objective.model.{key}.init_from: needs callbacks.initial_weights, which sparo.fit sets. Call sparo.fit."
            )
    objective.on_weights_loaded()


@dataclass(frozen=True)
class Callbacks:
    """Functions that a program adds to a training.

    Attributes:
        display: (name of the run, whether this rank is silent) -> a context with a `Display`.
        initial_weights: (blocks `objective` and `start_from`, the objective) loads the weights that a recipe names;
            called for new runs only.
        identity: values that must be equal on all ranks in addition to recipe, package versions and data, such as a
            hash of the code.
    """

    display: Callable[[str, bool], AbstractContextManager[Display]] = NoDisplay
    initial_weights: Callable[[Any, StartConfig | None, Objective], None] = refuse_initial_weights
    identity: Callable[[], Mapping[str, Any]] = field(default=dict)


@standard_settings()
def fit(
    config: RunConfig,
    evaluate: MakeEvaluate | None = None,
    callbacks: Callbacks | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train a recipe in its run folder, from its newest checkpoint if it has one.

    Args:
        config: the resolved recipe.
        evaluate: makes the function that scores the objective every `eval.every_steps` and at the end; None: no
            evaluation.
        callbacks: functions of the calling program.
        ranks: the processes that train together, already joined; None: those in the environment (torchrun, SLURM).

    Raises:
        ConfigError, DataError, CheckpointError, TrainingError: by key or file. Nothing is lost.

    Gradients are enabled, and the default dtype is fp32, until the function returns. The state of torch's random
    generator on the CPU is then the caller's again.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"fit: expected a recipe from sparo.load_recipe, got {type(config).__name__}. Write fit(load_recipe(…))."
        )
    callbacks = callbacks or Callbacks()
    own_ranks = ranks or build_ranks(config.engine, config.world_size, find_world(), config.folder)
    try:
        run, pipeline = _prepare(config, own_ranks, callbacks.identity)
        return _fit(run, pipeline, evaluate, callbacks)
    finally:
        if ranks is None:
            own_ranks.close()


def _prepare(config: RunConfig, ranks: Ranks, identity: Callable[[], Mapping[str, Any]]) -> tuple[Run, Pipeline]:
    """Build engine, objective and data. If something prevents training, raise on all ranks together."""
    # Ranks with another seed, learning rate or checkout would otherwise train together silently.
    if ranks.size > 1:
        facts = {"recipe": config.model_dump(mode="json"), "versions": package_versions(), **identity()}
        ranks.require_equal(facts, "recipe or code")
    pipeline = ranks.call_on_all(lambda: build_pipeline(config, ranks.world))
    ranks.require_equal({"data": pipeline.fingerprint}, "data")
    total_steps = config.total_steps(pipeline.plan.epoch_size)
    engine = ranks.call_on_all(lambda: build_engine(config.engine, config.optim, ranks))
    # With engine.device=auto, a node whose GPUs are lost would train on its CPU, and its ranks could not exchange gradients.
    ranks.require_equal({"engine.device": engine.device.type}, "device", "Repair that node, or exclude it.")
    objective = build_objective(config)
    objective.refuse_length(total_steps)
    # The optimizer would refuse this, too, but only after the run folder was created.
    group_numbers(config.optim.groups, [name for name, p in objective.named_parameters() if p.requires_grad])
    steps_per_epoch = config.steps_per_epoch(pipeline.plan.epoch_size)
    run = Run(config, ranks, engine, objective, pipeline, RunDir(config.folder), total_steps, steps_per_epoch)
    return run, pipeline


def _fit(run: Run, pipeline: Pipeline, make_evaluate: MakeEvaluate | None, callbacks: Callbacks) -> Outcome:
    config, ranks, rundir = run.config, run.ranks, run.rundir
    with ExitStack() as stack:
        stack.callback(rundir.close)
        log_file = stack.enter_context(_run_log(ranks))
        display = stack.enter_context(callbacks.display(config.name, ranks.rank > 0))
        # Refuse before writing to the folder, because it may contain a run that is still in use.
        evaluate = None if make_evaluate is None else make_evaluate(run, display)
        # Ask one rank only: two ranks that list a folder on a network disk may see different newest checkpoints.
        newest = ranks.rank0_broadcast(lambda: CheckpointStore(rundir.checkpoints).latest())
        if newest is None:
            callbacks.initial_weights(config.objective, config.start_from, run.objective)
        else:
            # One rank reads the checkpoint's facts, because they list the files of all ranks.
            recorded = ranks.rank0_broadcast(lambda: _recorded_start(newest))
            if recorded is not None:
                run = _keep_start(run, recorded)
                config = run.config
        # Before computing tokens of a whole data set for a run that would be refused; it writes nothing.
        ranks.call_on_all(lambda: rundir.refuse_changes(config))
        if pipeline.examples.reads_model:
            # Examples that read the model need the weights that training continues with, before the trainer loads them.
            _load_weights_to_continue(run, newest)
            pipeline.examples.ready(run.objective, pipeline.sources, run.engine.device_context, ranks)
        rundir.join(ranks.rank0_broadcast(lambda: _open_run_folder(run)))
        log_file.open(rundir.path / "log.txt")
        _log_start(run, pipeline.sources, newest)
        try:
            # Count on a second objective on the meta device, so that the trained one is not touched.
            flops = FlopCounter(lambda: build_objective(config)) if config.log.flops else None
            trainer = Trainer(run, display, evaluate, flops)
            outcome = trainer.fit()
        except SupersededError:  # not even to its log
            raise
        except SparoError as error:
            logger.error(f"error: {error}", extra=FILE_ONLY)
            raise
        # Log the total at the end, too, because readers of the log look for it there.
        if unusable := trainer.bad.by_reason():
            counts_text = ", ".join(f"{count:,} ({reason})" for reason, count in unusable.items())
            logger.warning(f"skipped samples: {counts_text}")
        where = f"checkpoint {outcome.checkpoint}" if outcome.checkpoint is not None else "no checkpoint yet"
        logger.info(f"{outcome.reason} at step {outcome.step}; {where}")
        return outcome


@contextmanager
def _run_log(ranks: Ranks) -> Iterator[RunLog]:
    """Collect what rank 0 logs, for RUN/log.txt. Other ranks log nothing; without a handler, Python would print their warnings."""
    with closing(RunLog()) as handler:
        used = handler if ranks.rank == 0 else logging.NullHandler()
        with logging_to(used):
            yield handler


def _load_weights_to_continue(run: Run, newest: Path | None) -> None:
    """Load the weights that training continues with before the trainer does, for examples that read them."""
    start = run.config.start_from
    if newest is None and start is not None and start.optimizer:
        newest = newest_step(Path(start.checkpoint))
        if newest is None:
            raise CheckpointError(f"{start.checkpoint}: no complete checkpoint yet. Train this run first.")
    if newest is not None:
        from ..models.weight_files.weights import load_into  # most runs begin without weight files

        load_into(run.objective, read_part(newest, "model"), str(newest))


def _recorded_start(newest: Path) -> dict[str, Any] | None:
    """Return the `start_from` with which a run began, {} for random weights; None if its checkpoint does not say."""
    with suppress(SparoError):  # damaged, or of a version whose keys are gone; others report it
        if recipe := read_run_meta(newest).get("recipe"):
            start = resolve(RunConfig, recipe, str(newest), stored=True).start_from
            return {} if start is None else start.model_dump(mode="json")
    return None


def _keep_start(run: Run, recorded: dict[str, Any]) -> Run:
    """Return a resumed run with the `start_from` with which it began in its recipe, because it is not read again."""
    start = StartConfig(**recorded) if recorded else None
    if start != run.config.start_from:
        began = "random weights" if start is None else start.checkpoint
        logger.warning(f"start_from: has no effect on a resumed run, which began with {began}")
    return run._replace(config=run.config.model_copy(update={"start_from": start}))


def _open_run_folder(run: Run) -> str:
    """Claim the run folder, unless its newest checkpoint is from other data; return the token of the claim."""
    rundir, config = run.rundir, run.config
    rundir.refuse_changes(
        config
    )  # first, because another batch size is another plan, and the error would blame the data
    newest = CheckpointStore(rundir.checkpoints).latest()
    if newest is not None:
        with suppress(CheckpointError):  # the trainer reports or skips a damaged one
            meta = read_run_meta(newest)
            refuse_changed(meta["fingerprint"], run.pipeline.fingerprint, str(newest))
            # The checkpoint may have been copied from another run, or the folder may lack its config.yaml.
            if recipe := meta.get("recipe"):
                rundir.refuse_other_recipe(config, recipe, newest)
    return rundir.open_for_training(config, 2 * config.log.heartbeat_seconds)


def _log_start(run: Run, sources: Sequence[Source], newest: Path | None) -> None:
    config, ranks = run.config, run.ranks
    # A resumed run logs where it continues instead.
    if not any(run.rundir.checkpoints.glob("step-*")):
        ranks_text = f" on {ranks.size} ranks" if ranks.size > 1 else ""
        for choice in config.choices:
            logger.info(choice.text)
        logger.info(f"{run.total_steps} steps of {config.batch_size} samples{ranks_text} -> {run.rundir.path}")
    for line in source_lines(sources, run.total_steps * config.batch_size):
        logger.info(line)
    if line := repetition_warning(*_totals_and_weights(sources), config.batch_size):
        logger.warning(line)
    for line in config.optim.unused_keys():
        logger.warning(line)
    # With several ranks per machine, the launcher sets the threads; a resumed run takes them from its checkpoint.
    if newest is None and ranks.size == 1 and (line := run.engine.device_context.choose_threads()):
        logger.info(line)
    for source in sources if ranks.rank == 0 else ():
        for key in missing_caption_keys(source):
            logger.warning(
                f"data.sources.{source.name}.captions: {key} is missing in all of the 64 samples that were checked. Its probability is shared by the other "
                "keys. Check the spelling."
            )
