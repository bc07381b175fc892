"""One optimizer step: agreement of all ranks before it, gradients from micro-batches, and skipped steps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.contracts import (
    Batch,
    BatchStream,
    CoupledObjective,
    DeviceContext,
    Engine,
    LoaderBatch,
    Loss,
    Objective,
    Progress,
    StepReport,
)
from ..core.disk import checkpoint_store as store
from ..core.distributed import Ranks
from ..core.errors import DataError, SparoError, TrainingError, WorkerLostError
from ..core.world import StopFlag
from ..data.read.bad_samples import BadSampleBudget
from .checkpointing import Saver
from .meter import Meter
from .state import State

logger = logging.getLogger(__name__)

_LAST = 2  # skipped steps that are allowed at the end: a single overflow in bf16 does not mean that the run diverged


def refuse_diverged(state: State, total_steps: int, checkpoint: Path | None, last_good: str) -> None:
    """Raise `TrainingError` at the end of a run that diverged.

    Its weights are not finite or above 1e9, it skipped half of its steps or more, or the last three of them.
    """
    sound = checkpoint is None or store.has_sound_weights(checkpoint)
    at_the_end = state.skipped_in_a_row > _LAST
    if sound and 2 * state.skipped_steps < max(state.step, 1) and not at_the_end:
        return
    causes = [] if sound else ["its weights are not finite or above 1e9"]
    if state.skipped_steps:
        last = f", the last {state.skipped_in_a_row} among them" if at_the_end else ""
        causes.append(f"{state.skipped_steps} of {state.step} steps were skipped as non-finite{last}")
    raise TrainingError(
        f"step {state.step} of {total_steps} is done, but {' and '.join(causes)}. Try a lower optim.lr, "
        f"optim.clip_grad_norm=1.0 or engine.precision=fp32; {last_good}."
    )


class SkippedSteps:
    """Results of the steps since the host last checked.

    On a CPU, the host checks after every step. On a GPU, checking waits for the device, so the host checks where it
    waits anyway (log steps, saves, the end), and a run may take a few more steps before it ends.

    Args:
        limit: `optim.max_consecutive_skips`.
        last_good: returns a description of the last good checkpoint, for the error.
    """

    def __init__(self, limit: int, last_good: Callable[[], str]):
        self.limit, self._last_good = limit, last_good
        self._pending: list[tuple[int, bool | Tensor, Tensor]] = []

    def add(self, step: int, report: StepReport) -> None:
        """Add the report of a step, applied or skipped; `step` is its number."""
        self._pending.append((step, report.applied, report.grad_norm))

    def needs_no_sync(self) -> bool:
        """Return whether `count_steps` would not wait for the device."""
        return all(isinstance(applied, bool) for _, applied, _ in self._pending)

    def count_steps(self, state: State) -> None:
        """Count applied and skipped steps in `state`. Raises `TrainingError` over the limit."""
        pending, self._pending = self._pending, []
        for step, applied, norm in pending:
            if bool(applied):
                state.skipped_in_a_row = 0
                continue
            state.skipped_steps += 1
            state.skipped_in_a_row += 1
            # Log at once, not at the end, while a user can still lower the rate.
            logger.warning(
                f"step {step}: skipped, because the gradient norm is {float(norm)} ({state.skipped_in_a_row} in a row)"
            )
            if state.skipped_in_a_row > self.limit:
                raise TrainingError(
                    f"step {step}: {state.skipped_in_a_row} non-finite steps in a row "
                    f"(optim.max_consecutive_skips={self.limit}). Try a lower optim.lr, optim.clip_grad_norm=1.0 or "
                    f"engine.precision=fp32; {self._last_good()}."
                )


def gradients(engine: Engine, objective: Objective, batch: Batch, progress: Progress, micro_batch_size: int) -> Loss:
    """Run forward and backward over this rank's batch, at most `micro_batch_size` samples at a time.

    Returns:
        The loss of the whole batch, detached.
    """
    parts = split(batch, micro_batch_size)
    # One forward if possible: no second forward, and no sums in another order.
    if len(parts) == 1:
        loss = engine.forward(batch, progress, last=True)
        engine.backward(loss.total, last=True)
        return loss._replace(total=loss.total.detach())
    if isinstance(objective, CoupledObjective):
        return _cached_backward(engine, objective, parts, progress)
    return _weighted_backward(engine, parts, progress)


def split(batch: Batch, size: int) -> list[dict[str, Tensor]]:
    """Split a batch into pieces of `size` samples; the last one may be smaller."""
    # All entries of a batch have the same number of rows.
    total = len(next(iter(batch.values())))
    return [{key: value[begin : begin + size] for key, value in batch.items()} for begin in range(0, total, size)]


def _weighted_backward(engine: Engine, parts: list[dict[str, Tensor]], progress: Progress) -> Loss:
    sizes = [len(next(iter(part.values()))) for part in parts]
    total: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    shares: dict[str, float] = {}
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        # Weigh by size, because the last micro-batch may be smaller.
        weight = size / sum(sizes)
        last = number == len(parts) - 1
        loss = engine.forward(part, progress, last=last)
        engine.backward(loss.total * weight, last=last)
        total = loss.total.detach() * weight + (0 if total is None else total)
        # Weigh metrics like the loss, so that logs do not depend on the micro-batch size.
        for name, value in loss.metrics.items():
            metrics[name] = value * weight + metrics.get(name, 0)
            shares[name] = weight + shares.get(name, 0.0)
    assert total is not None
    # Average over the parts that have the metric: a missing one is not zero. Shares of all parts sum to one up to
    # rounding.
    whole = {name: value if shares[name] > 1 - 1e-9 else value / shares[name] for name, value in metrics.items()}
    return Loss(total, whole)


def _cached_backward(
    engine: Engine, objective: CoupledObjective, parts: list[dict[str, Tensor]], progress: Progress
) -> Loss:
    states, cached = [], []
    for part in parts:
        # Both forwards need the same dropout, or the cached gradient would belong to other embeddings.
        states.append(engine.device_context.random_state())
        with torch.no_grad():
            cached.append(engine.embed(part, last=False))
    leaves = tuple(torch.cat(pieces).requires_grad_() for pieces in zip(*(c.features for c in cached), strict=True))
    # Copies, because a gradient left on the parameters would be exchanged in the first backward.
    own = tuple(p.detach().clone().requires_grad_() for p in cached[0].loss_params)
    loss = objective.loss(leaves, own, progress)
    # Once for all micro-batches, because a coupled loss communicates with the other ranks here.
    grads = torch.autograd.grad(loss.total, [*leaves, *own])
    embedding_grads, param_grads = grads[: len(leaves)], grads[len(leaves) :]
    begin = 0
    for number, (part, state) in enumerate(zip(parts, states, strict=True)):
        last = number == len(parts) - 1
        engine.device_context.set_random_state(state)
        rows, parameters = engine.embed(part, last=last)
        end = begin + len(rows[0])
        # Its gradient with respect to the embeddings is the cached one, so an ordinary backward continues from it.
        carrier = torch.stack([(e * g[begin:end]).sum() for e, g in zip(rows, embedding_grads, strict=True)]).sum()
        if last:  # parameters of the loss take part in the last backward, in which ranks exchange gradients
            carrier = carrier + sum(
                ((p * g).sum() for p, g in zip(parameters, param_grads, strict=True)), carrier.new_zeros(())
            )
        engine.backward(carrier, last=last)
        begin = end
    return loss._replace(total=loss.total.detach())


def next_batch(
    batches: BatchStream, meter: Meter, device_context: DeviceContext, whole: bool
) -> tuple[LoaderBatch | None, SparoError | None]:
    """Return the next batch, or the error that prevented it, because the other ranks must learn of it first.

    Args:
        batches, meter, device_context: of this training; the meter counts the time spent waiting.
        whole: copy the batch to the device; False: its micro-batches are copied one by one.
    """
    with meter.waiting():
        try:
            loader_batch = next(batches)
        except SparoError as error:
            return None, error
    batch = loader_batch.batch
    return loader_batch._replace(batch=dict(device_context.prefetch_to_device(batch)) if whole else batch), None


class Upcoming(NamedTuple):
    """This rank's next batch, or the error that prevented it, and the flags of all ranks about theirs."""

    loader_batch: LoaderBatch | None
    error: SparoError | None
    flags: Callable[[], list[int]]


class RankSync:
    """Synchronizes the decisions of all ranks: ranks that end at different steps cannot write one checkpoint.

    Ranks `ask` one step before they `agree`, so that the exchange takes place while a step is computed: gloo reduces in
    a ring, with 2,046 messages one after another for 1,024 ranks.

    Args:
        every_minutes: minutes between checkpoints, by rank 0's clock; 0 for none.
    """

    def __init__(self, ranks: Ranks, saver: Saver, bad: BadSampleBudget, every_minutes: float):
        self.ranks, self.saver, self.bad, self.every_minutes = ranks, saver, bad, every_minutes
        self.restart_timer()

    def restart_timer(self) -> None:
        """Restart the count of minutes to the next checkpoint."""
        self._last_save = time.monotonic()

    def ask(self, stop: StopFlag, loader_batch: LoaderBatch | None, error: SparoError | None) -> Upcoming:
        """Start an exchange about the next batch of each rank, or the error that prevented it."""

        def own_flags() -> list[int]:
            # Use rank 0's clock only: with their own clocks, ranks would save at different steps.
            due = self.ranks.rank == 0 and 0 < 60 * self.every_minutes < time.monotonic() - self._last_save
            due |= stop.take_save()  # of any rank
            if due:  # the next exchange begins before this checkpoint is written
                self.restart_timer()
            skipped = loader_batch is not None and bool(loader_batch.skipped)
            return [stop.number(), error is not None, due, skipped, self.saver.failed]

        # All flags share one max all-reduce. A single rank reads its own when it needs them.
        flags = own_flags if self.ranks.size == 1 else self.ranks.start_all_reduce_max(own_flags())
        return Upcoming(loader_batch, error, flags)

    def agree(self, upcoming: Upcoming, samples: int) -> tuple[str | None, bool]:
        """Agree with all ranks on whether to stop or save before the step of a batch.

        Args:
            upcoming: from `ask`.
            samples: valid samples seen so far, including this batch.

        Returns:
            The signal to stop for (or None), and whether a checkpoint is due by time or was requested by SIGUSR1.

        Raises:
            SparoError: any rank's data has an error, or there are too many bad samples; the same on every rank.
        """
        loader_batch, error, flags = upcoming
        signal, any_error, checkpoint_due, any_skipped, save_failed = flags()
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
        ):  # after a signal, the resumed run reads the batch again
            # Skipped samples are rare, so their reasons are exchanged only when there are any.
            skip_counts, keys = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
            for skips, first_keys in self.ranks.gather((loader_batch.skipped, dict(loader_batch.first_keys))):
                skip_counts, keys = skip_counts + Counter(skips), first_keys | keys
            with self.ranks.raise_on_all():
                self.bad.add(skip_counts, samples, keys)
        return StopFlag.name(signal), bool(checkpoint_due)
