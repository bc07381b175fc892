"""Checkpoints of a run: staged and written by a thread while training continues, and read again to resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.contracts import DataPipeline, Engine
from ..core.disk import checkpoint_store as store
from ..core.disk.checkpoint_store import CheckpointStore, Files, open_checkpoint, read_run_meta
from ..core.disk.pieces import CheckpointReader, Piece, Pieces
from ..core.distributed import Ranks
from ..core.errors import CheckpointError, DataError, SparoError, SupersededError
from ..data.read.bad_samples import BadSampleBudget
from ..data.read.sources import refuse_changed
from .run_config import StartConfig
from .state import State

logger = logging.getLogger(__name__)

T = TypeVar("T")


# A moment whose square is no fp32 number is lost. A weight is long before: a few products of such numbers overflow.
_LARGEST = {"model": 1e9, "optimizer": 1e19}


def _is_sound(pieces: Pieces) -> bool:
    """Whether weights and moments are numbers that can be trained on."""
    for part, part_pieces in pieces.items():
        largest = _LARGEST.get(part, 1e19)
        for piece in part_pieces.values():
            if piece.data.is_floating_point() and piece.data.numel():
                # numpy's one thread: torch's team of threads would wait for the team that trains, and let it wait
                data = (piece.data if piece.data.element_size() >= 4 else piece.data.float()).numpy()
                if not (data.min() >= -largest and data.max() <= largest):  # False for NaN, too
                    return False
    return True


class Saver:
    """Writes and finds checkpoints, one at a time; the next save, the end of the run and an error of it wait for the one under way.

    The threads of the ranks talk through a process group of their own: on training's they would mix with its collectives.

    Args:
        store: where to.
        ranks: who writes together.
        background: False waits for every checkpoint before training goes on.
    """

    def __init__(self, store: CheckpointStore, ranks: Ranks, background: bool = True):
        self.store, self.ranks, self.background = store, ranks, background
        # One thread: two checkpoints at once would read the same staged copies.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None
        self._staged: dict[tuple[str, str], Tensor] = {}
        self._waited = 0.0

    def save(self, step: int, pieces: Pieces, meta: Mapping[str, Any]) -> None:
        """Write this rank's pieces and, all ranks together, make the checkpoint of `step`.

        Raises:
            CheckpointError: the one before could not be written, or this one where it is not written in the background.
        """
        begin = time.monotonic()
        # The one before first: its staged copies are the memory that this one writes into.
        self.wait()
        # The next step writes into these very tensors; only a copy stands still.
        staged = {
            part: {name: self._stage_copy(part, name, p) for name, p in part_pieces.items()}
            for part, part_pieces in pieces.items()
        }
        self._under_way = self._thread.submit(self._write, step, staged, meta)
        if not self.background:
            self.wait()
        self._waited += time.monotonic() - begin

    def last_good(self) -> str:
        """The newest checkpoint from before a run diverged, in words."""
        self.wait()
        sound = self.store.latest_valid()
        if sound is None:
            return "no checkpoint is from before that"
        return f"the last good checkpoint is {sound}; remove those behind it to go back there"

    def wait(self) -> Path | None:
        """Until the checkpoint under way is complete; raises on every rank what it failed with on any."""
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        with self.ranks.error_context("writing a checkpoint"):
            return under_way.result()

    def newest(
        self, check: Callable[[dict[str, Any], str], None], fall_back: bool
    ) -> tuple[Path, dict[str, Any], CheckpointReader] | None:
        """The newest complete checkpoint, its meta, and its tensors, every rank having verified its share of the files.

        Args:
            check: raises where a meta does not fit; called by rank 0 with the path before tensors are looked at.
            fall_back: take the one before where the newest is damaged, which is renamed; what that loses is said.

        Raises:
            CheckpointError: a file is missing or damaged; on every rank, whoever found it.
        """
        while True:
            try:
                return self._open_newest(check)
            except CheckpointError as error:
                # Asked of rank 0: the folder of another may lag behind on a network disk.
                older = self.ranks.rank0_broadcast(lambda: len(self.store.steps()) > 1)
                if not (fall_back and older):
                    raise
                aside, before = self.ranks.rank0_broadcast(self._fall_back)
                logger.warning(
                    f"{error}\ncheckpoint.fall_back: it was renamed to {aside}. Resuming from {before}; later steps are lost"
                )

    def _fall_back(self) -> tuple[Path, Path | None]:
        newest = self.store.latest()
        assert newest is not None
        return self.store.quarantine(newest), self.store.latest()

    def _open_newest(
        self, check: Callable[[dict[str, Any], str], None]
    ) -> tuple[Path, dict[str, Any], CheckpointReader] | None:

        def find_newest() -> tuple[Path, dict[str, Any]] | None:
            # What a killed start left would be counted as disk that is in use.
            self.store.sweep()
            path = self.store.latest()
            if path is None:
                return None
            meta = read_run_meta(path)
            check(meta, str(path))
            return path, meta

        newest = self.ranks.rank0_broadcast(find_newest)
        if newest is None:
            return None
        # Kept, not raised: a rank that left here would leave the others in the exchange below.
        reader: CheckpointReader | SparoError
        try:
            reader = open_checkpoint(newest[0], ("model", "optimizer"), (self.ranks.rank, self.ranks.size))
        except SparoError as error:
            reader = error
        # Damage on one rank ends all of them, or the others would train on without it.
        errors = [text for text in self.ranks.gather(str(reader) if isinstance(reader, SparoError) else None) if text]
        with self.ranks.raise_on_all():
            if errors or isinstance(reader, SparoError):
                raise CheckpointError(errors[0])
        return *newest, reader

    @property
    def failed(self) -> bool:
        """True where the checkpoint under way has ended with an error, which `wait` raises."""
        under_way = self._under_way
        return under_way is not None and under_way.done() and under_way.exception() is not None

    def take_wait_seconds(self) -> float:
        """Seconds that training stood still for saving since the last call."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def close(self) -> None:
        """End the thread after what it is writing. Nobody waits for it: it may be waiting for a rank that is gone."""
        self._thread.shutdown(wait=False)

    def _stage_copy(self, part: str, name: str, piece: Piece) -> Piece:
        """The piece in memory that the next steps do not write to; the same memory for every save."""
        data = piece.data
        buffer = self._staged.get((part, name))
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            # Pinned: only then does the copy from a GPU run beside what it computes.
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._staged[part, name] = buffer
        return piece._replace(data=buffer.copy_(data))

    def _write(self, step: int, pieces: Pieces, meta: Mapping[str, Any]) -> Path:
        own = self._try(
            step, lambda: (self.store.write(step, pieces, self.ranks.rank, self.ranks.size), _is_sound(pieces))
        )
        results = self.ranks.gather(own, saving=True)
        done = self._try(step, lambda: self._complete(step, results, meta)) if self.ranks.rank == 0 else None
        if isinstance(done, CheckpointError):
            self.store.abandon(step)
        # Nobody calls it saved before rank 0 has renamed the folder.
        done = self.ranks.gather(done, saving=True)[0]
        if isinstance(done, CheckpointError):
            # One of the ranks tells the human.
            done.repeated = self.ranks.rank > 0
            raise done
        assert done is not None
        return done

    def _complete(
        self, step: int, results: list[tuple[Files, bool] | CheckpointError], meta: Mapping[str, Any]
    ) -> Path:
        files: Files = {}
        # A step in which gradients were not finite may have left nothing wrong, or everything: it is no step to go back to.
        suspect, sound = meta.get("skipped_in_a_row", 0) > 0, True
        for rank, part in enumerate(results):
            if isinstance(part, CheckpointError):
                raise CheckpointError(f"rank {rank}: {part}") if self.ranks.size > 1 else part
            files, sound = files | part[0], sound and part[1]
        return self.store.complete(step, files, {**meta, "suspect": suspect or not sound, "sound": sound})

    def _try(self, step: int, call: Callable[[], T]) -> T | CheckpointError:
        """Whatever goes wrong on one rank has to be told to the others, which wait for it."""
        try:
            return call()
        except SupersededError:  # the others belong to the same lost start
            raise
        except CheckpointError as error:
            return error
        except Exception as error:
            # Anything at all: an error that stays in this thread would leave the other ranks waiting.
            return CheckpointError(f"{self.store.folder(step)}: could not be written ({type(error).__name__}: {error})")


def resume(
    start: StartConfig | None,
    fall_back: bool,
    saver: Saver,
    ranks: Ranks,
    engine: Engine,
    pipeline: DataPipeline,
    bad: BadSampleBudget,
) -> State:
    """Load a run's newest checkpoint into the engine, or that of the run it branches off; return the state to continue from.

    Args:
        start: the recipe's `start_from` block.  fall_back: `checkpoint.fall_back`.

    Raises:
        CheckpointError: a checkpoint that cannot be read or does not fit.
        DataError: the data changed since the checkpoint.
    """
    newest = saver.newest(
        lambda meta, at: refuse_changed(meta["fingerprint"], pipeline.fingerprint, at),
        fall_back,
    )
    if newest is None:
        if start is not None and start.optimizer:
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
    logger.info(f"resuming from {path} (step {state.step} of {meta.get('total_steps', '?')})")
    if meta.get("suspect"):
        logger.warning(f"its weights are from a run that diverged; {saver.last_good()}")
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
            f"start_from.checkpoint={path}: has no complete checkpoint, which start_from.optimizer=true requires"
        )
    if doubt := store.checkpoint_warnings(path, step):
        logger.warning(f"start_from: {doubt}")
    meta = store.read_run_meta(step)
    # Before the data are compared: other data are no reason not to take the weights.
    try:
        engine.load(store.open_checkpoint(step, ("model", "optimizer")))
    except CheckpointError as error:
        raise CheckpointError(
            f"start_from.checkpoint={path}: {error}; a branch needs the model, frozen parameters, objective.ema and optim.kind of the original run. "
            "Set start_from.optimizer=false to load only its weights."
        ) from None
    theirs = State.of(meta)
    own = State(steps_before=theirs.steps_before + theirs.step)
    note = f"start_from: weights and moments of {step} (its step {meta['step']})"
    try:
        refuse_changed(meta["fingerprint"], pipeline.fingerprint, str(step))
    except DataError:
        logger.warning(f"{note}; its data differ, so data are read from the beginning")
        return own
    logger.info(note)
    own.cursor = theirs.cursor
    return own
