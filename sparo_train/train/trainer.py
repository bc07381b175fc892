"""The training loop: data, forward, backward, step, log, evaluate, save. It depends on no particular method, engine or format."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from ..core.contracts import BatchStream, LoaderBatch, Progress
from ..core.disk import checkpoint_store as store
from ..core.errors import CheckpointError, LostRankError, SparoError, SupersededError
from ..core.rng import torch_seed
from ..core.world import StopFlag
from ..data.read.bad_samples import BadSampleBudget
from .checkpointing import Saver, find_start
from .meter import FlopCounter, RunClock
from .reporting import Collector, Evaluation, Profile, Reporter
from .state import Display, Evaluate, Outcome, Run, State
from .step import RankSync, SkippedSteps, Upcoming, gradients, next_batch, refuse_diverged


class Trainer:
    """One run on one engine.

    Args:
        run: the training; rank 0 has opened its run folder.
        display: shows the progress.
        evaluate: called every `eval.every_steps` and at the end; None: no evaluation.
        flops: counts a step's model FLOPs for the metrics; None: they are not logged.
    """

    def __init__(self, run: Run, display: Display, evaluate: Evaluate | None = None, flops: FlopCounter | None = None):
        self.config, self.ranks, self.engine, self.objective, self.pipeline, rundir, *_ = run
        self.total_steps, self.steps_per_epoch = run.total_steps, run.steps_per_epoch
        self.display, self.state, self._rundir = display, State(), rundir
        config, ranks = self.config, self.ranks
        self.bad = BadSampleBudget(config.data.max_bad_share, config.data.max_bad_share_min_samples)
        every, claim = config.checkpoint, rundir.lease
        self.store = store.CheckpointStore(
            rundir.checkpoints, every.keep_last, every.keep_every, claim.check, f"{claim.token}-"
        )
        self.saver = Saver(self.store, ranks, every.background)
        self.skips = SkippedSteps(config.optim.max_consecutive_skips, self.saver.last_good)
        self.reporter = Reporter(config.log, rundir, ranks, run.engine, display, flops)
        self.evaluation = Evaluation(evaluate, config.eval, run.engine, ranks, self.reporter)
        self._facts = {
            "recipe": config.model_dump(mode="json"),
            "world_size": ranks.size,
            "fingerprint": run.pipeline.fingerprint,
            "total_steps": run.total_steps,
        }
        self._profile = (config.log.profile if ranks.rank == 0 else None, rundir.path / "profile")

    def fit(self) -> Outcome:
        """Train from the newest complete checkpoint (or the start) to the end, a signal, or an error; the state is saved in all cases.

        Raises:
            TrainingError: too many non-finite steps in a row.
            DataError: too many bad samples, or the data set changed since the checkpoint.
            CheckpointError: a checkpoint cannot be read or written.
        """
        self.clock, config = RunClock(), self.config
        self.state, load = find_start(
            config.start_from, config.checkpoint.fall_back, self.saver, self.ranks, self.pipeline, self.bad
        )
        # With fewer steps requested, the schedule is still that of the whole run: a trial's steps are its first ones.
        end = min(self.total_steps, self.config.stop_after_steps or self.total_steps)
        with StopFlag() as stop, ExitStack() as workers:  # an error must not leave loader workers running
            # Before the device is used: forked processes must not inherit its context, or memory that NCCL registered.
            batches = self.pipeline.start(self.state.cursor, self.engine.device) if self.state.step < end else None
            if batches is not None:
                workers.callback(batches.close)
            self.engine.prepare(self.objective)
            load(self.engine)
            return self._fit(batches, end, stop, workers)

    def _fit(self, batches: BatchStream | None, end: int, stop: StopFlag, workers: ExitStack) -> Outcome:
        self.clock = RunClock(self.state.seconds + self.clock.elapsed)
        # One rank reads the records; others could read them while they are being written.
        self.evaluation.scored = self.ranks.rank0_broadcast(self._open_records)
        self.profile = Profile(*self._profile)
        try:
            with Collector() as self.garbage:
                # Manual garbage collection ends with the loop, because nothing calls for it at steps afterwards.
                signal = self._loop(batches, end, stop)
                workers.close()
                return self._end(signal)
        except (LostRankError, SupersededError, CheckpointError):
            raise  # no other rank to save with, no right to write, or no way to
        except SparoError as error:
            if self.ranks.size == 1 or error.on_all_ranks:  # all ranks have to save together
                self._ensure_saved()
            raise
        finally:
            self.saver.close()
            self.profile.close()
            self.reporter.close()

    def _open_records(self) -> set[int]:
        """Open the records of the run on rank 0, now that its device can be named; return the steps that are evaluated."""
        self._facts["environment"] = self._rundir.write_environment()
        return self.reporter.open(self.state.step)

    def _loop(self, batches: BatchStream | None, end: int, stop: StopFlag) -> str | None:
        """Train up to step `end`, from `batches` unless it was reached before; return the signal that stopped it, or None."""
        state, every_steps = self.state, self.config.checkpoint.every_steps
        sync = RankSync(self.ranks, self.saver, self.bad, self.config.checkpoint.every_minutes)

        whole = self.config.micro_batch(self.ranks.size) * self.ranks.size >= self.config.batch_size

        def ask() -> Upcoming:
            assert batches is not None
            return sync.ask(stop, *next_batch(batches, self.reporter.meter, self.engine.device_context, whole))

        self.reporter.meter.start()
        upcoming = ask() if state.step < end else None
        while True:
            # Before comparing with `end`, so that a run that was stopped before its evaluation evaluates this step
            # when it resumes.
            if self.evaluation.due(state.step) and (signal := self._evaluate()):
                return signal
            if upcoming is None:
                return None
            # Before using the batch, so that the resumed run begins with the batch that a signal left unused.
            signal, checkpoint_due = sync.agree(upcoming, state.samples + self.config.batch_size)
            loader_batch = upcoming.loader_batch
            if signal is not None or loader_batch is None:
                return signal
            # While a GPU is busy with the previous step, read the batch after this one and copy it to the device.
            upcoming = ask() if state.step + 1 < end else None
            self._step(loader_batch)
            checkpoint_due |= every_steps > 0 and state.step % every_steps == 0
            if checkpoint_due and state.step < end:  # `_end` saves the last step
                self.save()
                sync.restart_timer()
            self.garbage.step(state.step)
            self.profile.step()

    def _step(self, loader_batch: LoaderBatch) -> None:
        state, log = self.state, self.config.log
        if state.step == 0:
            self.reporter.first_batch(self.pipeline, loader_batch.batch)
        # Seed from (seed, step, rank), so results do not depend on the history or on an earlier world size; a branch
        # continues where its run was.
        torch.manual_seed(torch_seed(self.config.seed, "step", state.steps_before + state.step, self.ranks.rank))
        progress = Progress(state.step, self.total_steps, state.samples, self.steps_per_epoch, state.steps_before)
        micro = self.config.micro_batch(self.ranks.size)
        # The method may change its inputs with progress (growing images), which the data plan does not know.
        batch = self.objective.preprocess_batch(loader_batch.batch, progress)
        with self.ranks.error_context(f"step {state.step + 1}"):
            loss = gradients(self.engine, self.objective, batch, progress, micro)
            report = self.engine.step(progress)
        # Count the step before anything that inspects it can fail: a save then contains this step with its cursor.
        state.step, state.samples = state.step + 1, state.samples + self.config.batch_size
        state.cursor = loader_batch.cursor
        self.skips.add(state.step, report)
        self.reporter.done(state.step, self.total_steps, self.clock, report)
        logged = state.step % log.every_steps == 0 or state.step == self.total_steps
        if logged or self.skips.needs_no_sync():
            self._count_skipped()
        self.reporter.meter.add(self.config.batch_size)
        if self.reporter.meter.beat_due(log.heartbeat_seconds):
            self._beat("training")
            self.reporter.show_progress(state.step, self.total_steps, self.clock)
        if logged:
            self.reporter.show_progress(state.step, self.total_steps, self.clock)
            facts = self.reporter.step(state.step, self.total_steps, loss, report, batch, self.objective)
            facts |= {
                "save_wait": self.saver.take_wait_seconds(),
                "samples": state.samples,
                "skipped_steps": state.skipped_steps,
            }
            if self.bad.counts:
                facts |= {"bad_samples": self.bad.by_reason(), "bad_shards": self.bad.by_shard()}
            self.reporter.write("train", state.step, facts)

    def _count_skipped(self) -> None:
        with self.ranks.raise_on_all():  # the gradient norm is equal on all ranks
            self.skips.count_steps(self.state)

    def _beat(self, phase: str) -> None:
        self.reporter.beat(self.state.step, self.total_steps, phase)

    def _evaluate(self) -> str | None:
        """Evaluate this step; return the signal that interrupted it, or None."""
        self._beat("evaluating")
        start_seconds = self.clock.elapsed
        signal = self.evaluation.run(self.state.step)
        self.clock.pause(self.clock.elapsed - start_seconds)
        self.garbage.collect_all()  # an evaluation leaves much garbage, and no rank waits for a step here
        self.reporter.meter.start()
        return signal

    def _end(self, signal: str | None) -> Outcome:
        step = self.state.step
        reason = signal or ("finished" if step >= self.total_steps else "stop_after_steps")
        path = self._ensure_saved()  # before the last evaluation, which may fail
        if signal is None:
            good = self.saver.last_good
            self.ranks.rank0_broadcast(lambda: refuse_diverged(self.state, self.total_steps, path, good()))
        if reason == "finished" and self.evaluation.missing_tasks(step):
            reason = self._evaluate() or reason
        self._beat(reason)
        return Outcome(reason, step, path)

    def _ensure_saved(self) -> Path | None:
        """Return the complete checkpoint of this step, writing it now if necessary; None before the first step."""
        if not self.state.step:
            return None
        self.saver.wait()  # the pending one may be of this step
        written = self.ranks.rank0_broadcast(lambda: self.store.steps().get(self.state.step))
        if written is None:
            self.save()
            self.saver.wait()
            self.ranks.rank0_broadcast(lambda: None)  # rank 0 is done: launchers end all ranks once one exits
        return self.store.folder(self.state.step)

    def save(self) -> None:
        """Start writing a checkpoint of everything that training depends on."""
        state, start_seconds = self.state, self.clock.elapsed
        self._count_skipped()
        self._beat("saving")
        state.seconds = start_seconds
        # Each rank's own position, because loaders read ahead by different numbers of batches.
        cursors = self.ranks.gather_on_rank0(state.cursor)
        kernel = self.engine.device_context.kernel
        meta = {} if cursors is None else {**self._facts, **state.meta(cursors, self.bad.state(), kernel)}
        self.saver.save(state.step, self.engine.pieces(), meta)
        self.clock.pause(self.clock.elapsed - start_seconds)
