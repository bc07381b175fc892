"""What all ranks agree on before every step: whether to stop or save, and what is wrong. Uses gloo, which waits for no GPU."""

from __future__ import annotations

import time
from collections import Counter

from ..core.contracts import LoaderBatch
from ..core.distributed import Ranks
from ..core.errors import DataError, SparoError, WorkerLostError
from ..core.signals import StopFlag
from ..data.read.bad_samples import BadSampleBudget
from .checkpointing import Saver


class RankSync:
    """Synchronizes the decisions of all ranks: ranks that end at different steps cannot write one checkpoint.

    Args:
        every_minutes: minutes between checkpoints, by rank 0's clock; 0 for none.
    """

    def __init__(self, ranks: Ranks, saver: Saver, bad: BadSampleBudget, every_minutes: float):
        self.ranks, self.saver, self.bad, self.every_minutes = ranks, saver, bad, every_minutes
        self.restart_timer()

    def restart_timer(self) -> None:
        """Count the minutes to the next checkpoint from now."""
        self._last_save = time.monotonic()

    def synchronize(
        self, stop: StopFlag, loader_batch: LoaderBatch | None, error: SparoError | None, samples: int
    ) -> tuple[str | None, bool]:
        """Agree with all ranks on whether to stop or save before this step.

        Args:
            loader_batch, error: this rank's next batch, or the error that prevented it.
            samples: valid samples seen so far, including this batch.

        Returns:
            The signal to stop for (or None), and whether a checkpoint is due by time.

        Raises:
            SparoError: any rank's data has an error, or there are too many bad samples; the same on every rank.
        """
        # Use rank 0's clock only: with their own clocks, ranks would save at different steps.
        checkpoint_due = self.ranks.rank == 0 and 0 < 60 * self.every_minutes < time.monotonic() - self._last_save
        skipped = loader_batch is not None and bool(loader_batch.skipped)
        # All flags share one max all-reduce.
        flags = [stop.number(), error is not None, checkpoint_due, skipped, self.saver.failed]
        signal, any_error, checkpoint_due, any_skipped, save_failed = self.ranks.all_reduce_max(flags)
        # Waiting raises the writer's error on every rank: a run must not continue without its checkpoints.
        if save_failed:
            self.saver.wait()
        # With a single rank, raise the original error: it keeps its traceback.
        if error is not None and self.ranks.size == 1:
            raise error
        if any_error:
            # Report the first error only: the others are usually its consequences.
            rank, first = next((rank, e) for rank, e in enumerate(self.ranks.gather(error)) if e is not None)
            with self.ranks.raise_on_all():
                raise (WorkerLostError if isinstance(first, WorkerLostError) else DataError)(f"rank {rank}: {first}")
        if (
            any_skipped and not signal and loader_batch is not None
        ):  # after a signal the resumed run reads the batch again
            # Skipped samples are rare, so their reasons get an exchange of their own.
            skip_counts, keys = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
            for skips, first_keys in self.ranks.gather((loader_batch.skipped, dict(loader_batch.first_keys))):
                skip_counts, keys = skip_counts + Counter(skips), first_keys | keys
            with self.ranks.raise_on_all():
                self.bad.add(skip_counts, samples, keys)
        return StopFlag.name(signal), bool(checkpoint_due)
