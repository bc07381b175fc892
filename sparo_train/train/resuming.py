"""Where a run continues: from its own newest checkpoint, or from another run's weights, moments and place in the data."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..core.contracts import DataPipeline, Engine
from ..core.disk import checkpoint_store as store
from ..core.distributed import Ranks
from ..core.errors import CheckpointError, DataError
from ..data.read.bad_samples import BadSampleBudget
from ..data.read.sources import refuse_changed
from .checkpointing import Saver
from .run_config import RunConfig
from .state import State

logger = logging.getLogger(__name__)


def resume(
    config: RunConfig,
    saver: Saver,
    ranks: Ranks,
    engine: Engine,
    pipeline: DataPipeline,
    bad: BadSampleBudget,
) -> State:
    """Load a run's newest checkpoint into the engine, or that of the run it branches off; return the state to continue from.

    Raises:
        CheckpointError: a checkpoint that cannot be read or does not fit.
        DataError: the data changed since the checkpoint.
    """
    newest = saver.newest(
        lambda meta, at: refuse_changed(meta["fingerprint"], pipeline.fingerprint, at),
        config.checkpoint.fall_back,
    )
    if newest is None:
        if (start := config.start_from) is not None and start.optimizer:
            with ranks.raise_on_all():
                return branch(Path(start.checkpoint), engine, pipeline)
        return State()
    path, meta, source = newest
    with ranks.raise_on_all():
        engine.load(source)
    if ranks.size == 1 and (line := engine.device_context.choose_threads(meta.get("threads", torch.get_num_threads()))):
        logger.info(line)
    # Another form of attention adds up in another order: the run would not end with the same bits.
    if warning := engine.device_context.restore_kernel(
        meta.get("attention", "plain")
    ):  # older versions took plain on CPUs
        logger.warning(warning)
    state = State.of(meta)
    bad.load(meta["bad_samples"])
    logger.info(f"continuing from {path} (step {state.step} of {meta.get('total_steps', '?')})")
    if meta.get("suspect"):
        logger.warning(f"its weights are from a run that had diverged; {saver.last_good()}")
    return state


def branch(path: Path, engine: Engine, pipeline: DataPipeline) -> State:
    """Load a run, or one of its steps, into an engine; returns a first step that knows how many lie behind it, and where its data stands,
    which is nowhere if this run's are others.

    Raises:
        CheckpointError: no checkpoint of a run of ours, or of another model.
    """
    step = store.newest_step(path)
    if step is None:
        raise CheckpointError(
            f"start_from.checkpoint={path}: no run with a complete checkpoint, which start_from.optimizer=true takes"
        )
    if doubt := store.checkpoint_warnings(path, step):
        logger.warning(f"start_from: {doubt}")
    meta = store.read_run_meta(step)
    # Before the data are compared: other data are no reason not to take the weights.
    try:
        engine.load(store.open_checkpoint(step, ("model", "optimizer")))
    except CheckpointError as error:
        raise CheckpointError(
            f"start_from.checkpoint={path}: {error}; a branch has the model, what is frozen, objective.ema and optim.kind of the run "
            "that it leaves; start_from.optimizer=false takes its weights alone"
        ) from None
    theirs = State.of(meta)
    own = State(steps_before=theirs.steps_before + theirs.step)
    note = f"start_from: weights and moments of {step} (its step {meta['step']})"
    try:
        refuse_changed(meta["fingerprint"], pipeline.fingerprint, str(step))
    except DataError:
        logger.warning(f"{note}; its data are others, and these are read from their beginning")
        return own
    logger.info(note)
    own.cursor = theirs.cursor
    return own
