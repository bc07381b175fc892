"""A run that begins where another one stands: weights, moments, and the place in the data."""

from __future__ import annotations

from pathlib import Path

from ..core.contracts import DataPipeline, Engine
from ..core.disk import store
from ..core.errors import CheckpointError, DataError
from ..data.read.sources import refuse_changed
from .state import Display, State


def branch(path: Path, engine: Engine, pipeline: DataPipeline, display: Display) -> State:
    """Load a run, or one of its steps, into an engine; returns a first step that knows how many lie behind it, and where its data stands,
    which is nowhere if this run's are others.

    Raises:
        CheckpointError: no checkpoint of a run of ours, or of another model.
    """
    step = path if (path / "meta.json").is_file() else store.CheckpointStore(path / "checkpoints").latest()
    if step is None:
        raise CheckpointError(
            f"start_from.checkpoint={path}: no run with a complete checkpoint, which start_from.optimizer=true takes"
        )
    meta = store.read_meta(step)
    # Before the data are compared: other data are no reason not to take the weights.
    try:
        engine.load(store.open_checkpoint(step, ("model", "optimizer")))
    except CheckpointError as error:
        raise CheckpointError(
            f"start_from.checkpoint={path}: {error}; a branch has the model, what is frozen, objective.ema and optim.muon of the run "
            "that it leaves; start_from.optimizer=false takes its weights alone"
        ) from None
    theirs = State.of(meta)
    own = State(steps_before=theirs.steps_before + theirs.step)
    said = f"start_from: weights and moments of {step} (its step {meta['step']})"
    try:
        refuse_changed(meta["fingerprint"], pipeline.fingerprint, str(step))
    except DataError:
        display.say(f"{said}; its data are others, and these are read from their beginning")
        return own
    display.say(said)
    own.cursor = theirs.cursor
    return own
