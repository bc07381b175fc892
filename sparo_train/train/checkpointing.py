"""Checkpoints of a run: a thread writes them while training continues (bytes: core/disk/pieces.py), and a resumed run loads them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.accelerator import is_streaming
from ..core.contracts import DataPipeline, Engine
from ..core.disk import checkpoint_store as store
from ..core.disk.checkpoint_store import CheckpointStore, Extents, Files, open_checkpoint, read_run_meta
from ..core.disk.pieces import CheckpointReader, Piece, Pieces
from ..core.distributed import Ranks
from ..core.errors import CheckpointError, DataError, SparoError, SupersededError
from ..data.read.bad_samples import BadSampleBudget
from ..data.sources.fingerprint import refuse_changed
from .run_config import StartConfig
from .state import State

logger = logging.getLogger(__name__)

T = TypeVar("T")


# A second moment that overflows in fp32 is lost. A weight is lost long before, because products of a few such values
# overflow.
_LARGEST = {"model": 1e9, "optimizer": 1e19}


def _is_sound(pieces: Pieces) -> bool:
    """Return whether weights and moments are finite and small enough to train on."""
    for part, part_pieces in pieces.items():
        largest = _LARGEST.get(part, 1e19)
        for piece in part_pieces.values():
            if piece.data.is_floating_point() and piece.data.numel():
                # numpy uses one thread; torch's threads would compete with those of training.
                data = (piece.data if piece.data.element_size() >= 4 else piece.data.float()).numpy()
                if not (data.min() >= -largest and data.max() <= largest):  # False for NaN, too
                    return False
    return True


class Saver:
    """Writer of checkpoints, one at a time. The next save, the end of the run and an error of the run wait for the pending one.

    The writer threads of the ranks use their own process group: on that of training, their messages would mix with its
    collectives.

    Args:
        store: checkpoints of the run folder.
        ranks: ranks that write together.
        background: False: training waits until each checkpoint is complete.
    """

    def __init__(self, store: CheckpointStore, ranks: Ranks, background: bool = True):
        self.store, self.ranks, self.background = store, ranks, background
        # A single thread: two saves at once would use the same staged copies.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None
        self._staged: dict[tuple[str, str], Tensor] = {}
        self._waited = 0.0

    def save(self, step: int, pieces: Pieces, meta: Mapping[str, Any]) -> None:
        """Write this rank's pieces and, together with all ranks, complete the checkpoint of `step`.

        Args:
            step: number of the step.
            pieces: what this rank writes.
            meta: content of meta.json; only rank 0's is used.

        Raises:
            CheckpointError: the previous checkpoint could not be written, or this one if `background` is False.
        """
        begin = time.monotonic()
        # Finish the previous save first, because this one reuses the memory of its staged copies.
        self.wait()
        # The next step writes to the original tensors, so the thread needs a copy.
        staged = {
            part: {name: self._stage_copy(part, name, p) for name, p in part_pieces.items()}
            for part, part_pieces in pieces.items()
        }
        devices = {piece.data.device for part_pieces in pieces.values() for piece in part_pieces.values()}
        for device in filter(is_streaming, devices):
            torch.accelerator.synchronize(device)  # once for all copies
        self._under_way = self._thread.submit(self._write, step, staged, meta)
        if not self.background:
            self.wait()
        self._waited += time.monotonic() - begin

    def last_good(self) -> str:
        """Describe the newest checkpoint from before a run diverged."""
        self.wait()
        sound = self.store.latest_valid()
        if sound is None:
            return "no earlier checkpoint exists"
        return f"the last good checkpoint is {sound}; remove later ones to resume from it"

    def wait(self) -> Path | None:
        """Wait until the pending checkpoint is complete; if it failed on any rank, raise the error on every rank."""
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        with self.ranks.error_context("writing a checkpoint"):
            return under_way.result()

    def newest(
        self, check: Callable[[dict[str, Any], str], None], fall_back: bool
    ) -> tuple[Path, dict[str, Any], CheckpointReader] | None:
        """Return the newest complete checkpoint, its meta, and its tensors, after every rank verified its share of the files.

        Args:
            check: raises if a meta does not fit; called on rank 0 with the path before tensors are read.
            fall_back: if the newest checkpoint is damaged, rename it and use the one before; a message says what that
                loses.

        Raises:
            CheckpointError: a file is missing or damaged; raised on every rank, whichever found it.
        """
        while True:
            try:
                return self._open_newest(check)
            except CheckpointError as error:
                # Ask rank 0 only, because other ranks may see an older state of a network disk.
                older = self.ranks.rank0_broadcast(lambda: len(self.store.steps()) > 1)
                if not (fall_back and older):
                    raise
                aside, before = self.ranks.rank0_broadcast(self._fall_back)
                logger.warning(
                    f"{error}\ncheckpoint.fall_back: the damaged checkpoint was renamed to {aside}. The run resumes from {before}; "
                    "later steps are trained again"
                )

    def _fall_back(self) -> tuple[Path, Path | None]:
        newest = self.store.latest()
        assert newest is not None
        return self.store.quarantine(newest), self.store.latest()

    def _open_newest(
        self, check: Callable[[dict[str, Any], str], None]
    ) -> tuple[Path, dict[str, Any], CheckpointReader] | None:

        def find_newest() -> tuple[Path, dict[str, Any]] | None:
            # Files of a killed start would otherwise keep using disk space.
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
        # Store the error instead of raising it, because the other ranks wait in the exchange below.
        reader: CheckpointReader | SparoError
        try:
            reader = open_checkpoint(newest[0], ("model", "optimizer"), (self.ranks.rank, self.ranks.size), newest[1])
        except SparoError as error:
            reader = error
        # Damage found by one rank ends all of them; otherwise the others would train without it.
        errors = [text for text in self.ranks.gather(str(reader) if isinstance(reader, SparoError) else None) if text]
        with self.ranks.raise_on_all():
            if errors or isinstance(reader, SparoError):
                raise CheckpointError(errors[0])
        return *newest, reader

    @property
    def failed(self) -> bool:
        """Return True if the pending checkpoint has ended with an error, which `wait` raises."""
        under_way = self._under_way
        return under_way is not None and under_way.done() and under_way.exception() is not None

    def take_wait_seconds(self) -> float:
        """Return the seconds since the last call for which saving blocked training."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def close(self) -> None:
        """End the thread after its current write. Nothing waits for it, because it may be waiting for a rank that is gone."""
        self._thread.shutdown(wait=False)

    def _stage_copy(self, part: str, name: str, piece: Piece) -> Piece:
        """Begin a copy to memory that the next steps do not change; every save reuses the same memory."""
        data = piece.data
        buffer = self._staged.get((part, name))
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            # Pinned memory, so that the copy from a GPU overlaps with computation.
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=is_streaming(data.device))
            self._staged[part, name] = buffer
        return piece._replace(data=buffer.copy_(data, non_blocking=True))

    def _write(self, step: int, pieces: Pieces, meta: Mapping[str, Any]) -> Path:
        own = self._try(
            step, lambda: (self.store.write(step, pieces, self.ranks.rank, self.ranks.size), _is_sound(pieces))
        )
        results = self.ranks.gather_on_rank0(own, saving=True)
        done = None if results is None else self._try(step, lambda: self._complete(step, results, meta))
        if isinstance(done, CheckpointError):
            self.store.abandon(step)
        # Report it as saved only after rank 0 has renamed the folder.
        done = self.ranks.broadcast(done, saving=True)
        if isinstance(done, CheckpointError):
            # One rank reports it.
            done.repeated = self.ranks.rank > 0
            raise done
        assert done is not None
        return done

    def _complete(
        self, step: int, results: list[tuple[tuple[Files, Extents], bool] | CheckpointError], meta: Mapping[str, Any]
    ) -> Path:
        files: Files = {}
        extents: Extents = {}
        # A step with gradients that are not finite may have damaged the state, so its checkpoint is marked as suspect.
        suspect, sound = meta.get("skipped_in_a_row", 0) > 0, True
        for rank, part in enumerate(results):
            if isinstance(part, CheckpointError):
                raise CheckpointError(f"rank {rank}: {part}") if self.ranks.size > 1 else part
            files, extents, sound = files | part[0][0], extents | part[0][1], sound and part[1]
        return self.store.complete(step, files, extents, {**meta, "suspect": suspect or not sound, "sound": sound})

    def _try(self, step: int, call: Callable[[], T]) -> T | CheckpointError:
        """Return the error of `call` instead of raising it, because the other ranks wait for this rank's result."""
        try:
            return call()
        except SupersededError:  # the others belong to the same abandoned start
            raise
        except CheckpointError as error:
            return error
        except Exception as error:
            # Catch everything: an error that stays in this thread would leave the other ranks waiting.
            return CheckpointError(f"{self.store.folder(step)}: could not be written ({type(error).__name__}: {error})")


def find_start(
    start: StartConfig | None,
    fall_back: bool,
    saver: Saver,
    ranks: Ranks,
    pipeline: DataPipeline,
    bad: BadSampleBudget,
) -> tuple[State, Callable[[Engine], None]]:
    """Find a run's newest checkpoint, or the checkpoint that it branches from, without the device.

    Args:
        start: the recipe's `start_from` block.
        fall_back: `checkpoint.fall_back`.
        saver: checkpoints of this run.
        ranks, pipeline: of this training.
        bad: receives the counts of skipped samples.

    Returns:
        The state to continue from, and a function that loads the checkpoint into a prepared engine.

    Raises:
        CheckpointError: a checkpoint cannot be read or, when it is loaded, does not fit.
        DataError: the data changed since the checkpoint.
    """
    newest = saver.newest(
        lambda meta, at: refuse_changed(meta["fingerprint"], pipeline.fingerprint, at),
        fall_back,
    )
    if newest is None:
        if start is not None and start.optimizer:
            with ranks.raise_on_all():
                return branch(Path(start.checkpoint), ranks, pipeline)
        return State(), lambda _engine: None
    path, meta, source = newest
    state = State.from_meta(meta)
    bad.load(meta["bad_samples"])

    def load(engine: Engine) -> None:
        with ranks.raise_on_all():
            engine.load(source)
        context = engine.device_context
        if ranks.size == 1 and (line := context.choose_threads(meta.get("threads", torch.get_num_threads()))):
            logger.info(line)
        # Another attention kernel sums in another order, so the run would not end with the same bits.
        if warning := context.restore_kernel(
            meta.get("attention", "plain")
        ):  # older versions used the plain kernel on CPUs
            logger.warning(warning)
        logger.info(f"resuming from {path} (step {state.step} of {meta.get('total_steps', '?')})")
        if meta.get("suspect"):
            logger.warning(f"{path}: the weights are from a run that diverged; {saver.last_good()}")

    return state, load


def branch(path: Path, ranks: Ranks, pipeline: DataPipeline) -> tuple[State, Callable[[Engine], None]]:
    """Find another run, or one of its steps. Return the state that a branch starts from, and a function that loads it.

    The branch starts at step 0 and records the steps before it. It continues in the data at the same position if both
    runs have the same data.

    Raises:
        CheckpointError: not a checkpoint of a training run, or, when it is loaded, of another model.
    """
    step = store.newest_step(path)
    if step is None:
        raise CheckpointError(
            f"start_from.checkpoint={path}: has no complete checkpoint, which start_from.optimizer=true requires"
        )
    if doubt := store.checkpoint_warnings(path, step):
        logger.warning(f"start_from: {doubt}")
    meta = store.read_run_meta(step)
    theirs = State.from_meta(meta)
    own = State(steps_before=theirs.steps_before + theirs.step)
    note = f"start_from: weights and moments of {step} (its step {meta['step']})"
    try:
        refuse_changed(meta["fingerprint"], pipeline.fingerprint, str(step))
        own.cursor = theirs.cursor
    except DataError:  # weights can be loaded with other data
        note += "; that run had other data, so this run reads its data from the beginning"

    def load(engine: Engine) -> None:
        try:
            with ranks.raise_on_all():
                engine.load(store.open_checkpoint(step, ("model", "optimizer"), meta=meta))
        except CheckpointError as error:
            error.args = (
                f"start_from.checkpoint={path}: {str(error).rstrip('.')}. To continue with its optimizer state, the model, frozen "
                "parameters, objective.ema and optim.kind must be those of that run. Set start_from.optimizer=false to load only its weights.",
            )
            raise
        logger.log(logging.INFO if own.cursor is not None else logging.WARNING, note)

    return own, load
