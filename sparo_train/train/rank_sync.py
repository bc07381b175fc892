"""What the ranks settle before every step: stop, save, or what is wrong. One small maximum over gloo, which waits for no GPU."""

from __future__ import annotations

import time
from collections import Counter

from ..core.contracts import LoaderBatch
from ..core.distributed import Ranks
from ..core.errors import DataError, SparoError, WorkerLostError
from ..core.signals import StopFlag
from ..data.read.bad_samples import BadSampleBudget
from .checkpointing import Saver


class Agreement:
    """Ranks that left behind different steps could not save together, so all of them decide the same.

    Args:
        every_minutes: after which a checkpoint is due, by rank 0's clock; 0: never.
    """

    def __init__(self, ranks: Ranks, saver: Saver, bad: BadSampleBudget, every_minutes: float):
        self.ranks, self.saver, self.bad, self.every_minutes = ranks, saver, bad, every_minutes
        self.saved()

    def saved(self) -> None:
        """A checkpoint was begun now."""
        self._saved = time.monotonic()

    def settle(
        self, stop: StopFlag, loader_batch: LoaderBatch | None, trouble: SparoError | None, samples: int
    ) -> tuple[str | None, bool]:
        """The signal to stop for, and whether a checkpoint is due by time.

        Args:
            loader_batch, trouble: this rank's next batch, or what is wrong with it.
            samples: good ones, this batch's included.

        Raises:
            SparoError: what any rank's data is in trouble with, or too many bad samples; on every rank alike.
        """
        # One clock for all: ranks that looked at their own would save at different steps.
        late = self.ranks.rank == 0 and 0 < 60 * self.every_minutes < time.monotonic() - self._saved
        skipped = loader_batch is not None and bool(loader_batch.skipped)
        # A maximum is all that is asked, so one small tensor carries every question.
        flags = [stop.number(), trouble is not None, late, skipped, self.saver.failed]
        signal, failed, late, any_skipped, unsaved = self.ranks.all_reduce_max(flags)
        # Waiting raises what the writer met, on every rank: a run must not go on without its checkpoints.
        if unsaved:
            self.saver.wait()
        # Alone, the error itself says more than a copy of its text.
        if trouble is not None and self.ranks.size == 1:
            raise trouble
        if failed:
            # One of them is told; the others are mostly its echo.
            rank, error = next(
                (rank, error) for rank, error in enumerate(self.ranks.gather(trouble)) if error is not None
            )
            with self.ranks.raise_on_all():
                raise (WorkerLostError if isinstance(error, WorkerLostError) else DataError)(f"rank {rank}: {error}")
        if any_skipped and not signal and loader_batch is not None:  # with a signal the batch is left for the resume
            # Rare, so what is skipped is told in full, in an exchange of its own.
            skip_counts, keys = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
            for skips, first in self.ranks.gather((loader_batch.skipped, dict(loader_batch.first_keys))):
                # A key seen on several ranks is told once: what is shown is an example, not a list.
                skip_counts, keys = skip_counts + Counter(skips), first | keys
            with self.ranks.raise_on_all():
                self.bad.add(skip_counts, samples, keys)
        return StopFlag.name(signal), bool(late)
