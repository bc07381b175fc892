"""The loop: data, forward, backward, step, log, evaluate, save. It knows no method, no engine and no format by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch

from ..core import store
from ..core.contracts import Batch, Cursor, DataPipeline, Delivery, Engine, Objective, Progress
from ..core.distributed import Ranks
from ..core.errors import DataError, SparoError, TrainingError
from ..core.metrics import MetricsLog, read
from ..core.rng import torch_seed
from ..core.rundir import RunDir, environment
from ..core.signals import StopFlag
from ..data.read.budget import BadSampleBudget
from ..data.read.sources import refuse_changed
from .accumulate import gradients
from .flops import FlopCounter, memory, utilisation
from .meter import Meter, over_ranks
from .run import RunConfig
from .saving import Saver
from .state import Display, Evaluate, Outcome, State


class Trainer:
    """One run on one engine.

    Args:
        config: the resolved recipe.
        rundir: opened for training (by rank 0).
        ranks: this process among those that train together.
        engine, objective, pipeline: what to train with.
        total_steps, steps_per_epoch: the length of the schedules.
        view: where progress is shown.
        evaluate: called every `eval.every_steps` and at the end; None: no evaluation.
        flops: counts a step's model FLOPs, for the metrics; None: they are left out.
    """

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDir,
        ranks: Ranks,
        engine: Engine,
        objective: Objective,
        pipeline: DataPipeline,
        total_steps: int,
        steps_per_epoch: int,
        view: Display,
        evaluate: Evaluate | None = None,
        flops: FlopCounter | None = None,
    ):
        self.config, self.rundir, self.ranks, self.engine, self.objective = config, rundir, ranks, engine, objective
        self.pipeline, self.total_steps, self.view = pipeline, total_steps, view
        self.evaluate, self.flops, self.steps_per_epoch = evaluate, flops, steps_per_epoch
        self.state = State()
        self.bad = BadSampleBudget(config.data.max_bad_share, config.data.max_bad_share_after)
        every = config.checkpoint
        claim = rundir.claim
        self.store = store.CheckpointStore(
            rundir.checkpoints, every.keep_last, every.keep_every, claim.check, f"{claim.token}-"
        )
        self.saver = Saver(self.store, ranks, every.background)
        self._origin = {"recipe": config.model_dump(mode="json"), "environment": environment()}
        self.meter = Meter()
        self.log: MetricsLog | None = None
        self._alarmed = False

    def fit(self) -> Outcome:
        """Train from the newest complete checkpoint (or the start) to the end, a signal, or an error.

        Raises:
            TrainingError: too many non-finite steps in a row.
            DataError: too many bad samples, or a data set that changed since the checkpoint.
            CheckpointError: a checkpoint that cannot be read or written.
        """
        self.engine.prepare(self.objective)
        self._restore()
        self._evaluated = self.ranks.first(self._open_log)
        end = min(self.total_steps, self.config.stop_after_steps or self.total_steps)
        try:
            with StopFlag() as stop:
                return self._end(self._loop(end, stop))
        except DataError:
            self._keep()
            raise
        finally:
            self.saver.close()
            if self.log is not None:
                self.log.close()

    def _open_log(self) -> set[int]:
        """On rank 0; returns the steps that are evaluated already."""
        log = self.config.log
        guard = self.rundir.claim.check
        self.log = MetricsLog(self.rundir.path, self.state.step, log.wandb, log.tensorboard, guard)
        return {record["step"] for record in read(self.log.path, "eval")}

    def _loop(self, end: int, stop: StopFlag) -> str | None:
        """Train up to step `end`; returns the signal that came before it, or None."""
        state, every = self.state, self.config.checkpoint
        self._saved = time.monotonic()
        with closing(self.pipeline.start(state.cursor)) as batches:  # an error must not leave loader workers behind
            self.meter.start()
            while True:
                if self.config.eval.every_steps and state.step and state.step % self.config.eval.every_steps == 0:
                    self._evaluate()
                if state.step >= end:
                    return None
                delivery, trouble = self._next(batches)
                signal, late = self._agree(stop, delivery, trouble)
                if signal is not None or delivery is None:
                    return signal
                self._step(delivery)
                due = every.every_steps and state.step % every.every_steps == 0
                if (due or late) and state.step < end:
                    self.save()
                    self._saved = time.monotonic()

    def _next(self, batches: Iterator[Delivery]) -> tuple[Delivery | None, SparoError | None]:
        """The next batch, or what is wrong with it: an error of one rank has to be told to the others first."""
        with self.meter.waiting():
            try:
                return next(batches), None
            except SparoError as error:
                return None, error

    def _agree(self, stop: StopFlag, delivery: Delivery | None, trouble: SparoError | None) -> tuple[str | None, bool]:
        """What all ranks do next: the signal to stop for, and whether a checkpoint is due by time; raises on trouble of any."""
        minutes = self.config.checkpoint.every_minutes
        late = self.ranks.rank == 0 and minutes > 0 and time.monotonic() - self._saved > 60 * minutes
        skipped = delivery is not None and bool(delivery.skipped)
        flags = [stop.number(), trouble is not None, late, skipped, self.saver.failed]
        signal, failed, late, any_skipped, unsaved = self.ranks.most(flags)
        if unsaved:
            self.saver.wait()
        if trouble is not None and self.ranks.size == 1:
            raise trouble
        if failed:
            told = self.ranks.gather(None if trouble is None else str(trouble))
            first = next((rank, text) for rank, text in enumerate(told) if text is not None)
            with self.ranks.alike():
                raise DataError(f"rank {first[0]}: {first[1]}")
        if any_skipped and not signal and delivery is not None:  # with a signal the batch is left for the resume
            found = sum((Counter(part) for part in self.ranks.gather(delivery.skipped)), Counter())
            with self.ranks.alike():
                self.bad.add(found, self.state.samples + self.config.batch_size)
        return StopFlag.name(signal), bool(late)

    def _end(self, signal: str | None) -> Outcome:
        step = self.state.step
        reason = signal or ("finished" if step >= self.total_steps else "stop_after_steps")
        path = self._keep()
        self._beat(reason)
        if reason == "finished":
            self._evaluate()
        return Outcome(reason, step, path)

    def _keep(self) -> Path | None:
        """The checkpoint of this very step, complete, written now if need be; None before the first."""
        if not self.state.step:
            return None
        self.saver.wait()
        written = self.ranks.first(lambda: self.store.steps().get(self.state.step))
        if written is None:
            self.save()
            self.saver.wait()
        return self.store.folder(self.state.step)

    def _step(self, delivery: Delivery) -> None:
        state, size, every = self.state, self.config.batch_size, self.config.log
        # Named, not carried on: what a step draws depends on neither the past nor the number of ranks before.
        torch.manual_seed(torch_seed(self.config.seed, "step", state.step, self.ranks.rank))
        progress = Progress(state.step, self.total_steps, state.samples, self.steps_per_epoch)
        micro = self.config.micro_batch(self.ranks.size)
        with self.ranks.named(f"step {state.step + 1}"):
            loss = gradients(self.engine, self.objective, delivery.batch, progress, micro)
            report = self.engine.step(progress)
        state.step, state.samples, state.cursor = state.step + 1, state.samples + size, delivery.cursor
        with self.ranks.alike():
            self._count_skips(report.applied, report.grad_norm)
        self.meter.add(size)
        if self.meter.beat_due(every.heartbeat_seconds):
            self._beat("training")
        if state.step % every.every_steps == 0 or state.step == self.total_steps:
            own = {name: float(value) for name, value in loss.metrics.items()} | self.meter.take()
            own |= {"memory": memory(self.engine.device), "forward_seconds": self.engine.forward_seconds()}
            own["save_wait"] = self.saver.waited()
            facts = over_ranks(self.ranks.gather(own)) | {"lr": report.lr, "grad_norm": report.grad_norm}
            facts |= {f"grad_norm_{part}": float(norm) for part, norm in report.norms.items()}
            self._watch(facts)
            self._report(facts | self._speed(delivery.batch, facts["samples_per_second"]))

    def _watch(self, facts: dict[str, float]) -> None:
        """Say what the objective finds alarming, once until it is over; `alarm` in the metrics is 1 as long as it lasts."""
        found = self.objective.alarm(facts)
        if found is not None and not self._alarmed:
            self.view.say(f"step {self.state.step}: {found}")
        self._alarmed = found is not None
        if self._alarmed:
            facts["alarm"] = 1.0

    def _speed(self, batch: Batch, samples_per_second: float) -> dict[str, float]:
        """Model FLOP/s of one rank, and their share of its device's peak where that is known."""
        if self.flops is None:
            return {}
        rate = self.flops.per_sample(batch) * samples_per_second / self.ranks.size
        share = utilisation(rate, self.engine.device)
        return {"tflops": rate / 1e12} | ({} if share is None else {"mfu": share})

    def _report(self, facts: dict[str, float]) -> None:
        state = self.state
        self.view.update(state.step, self.total_steps, facts)
        skipped: dict[str, Any] = {"skipped_steps": state.skipped_steps}
        if self.bad.counts:
            skipped |= {"bad_samples": self.bad.by_reason(), "bad_shards": self.bad.by_shard()}
        if self.log is not None:
            self.log.write("train", state.step, {"samples": state.samples, **facts, **skipped})

    def _beat(self, phase: str) -> None:
        if self.ranks.rank == 0:
            self.rundir.beat(step=self.state.step, total=self.total_steps, phase=phase)

    def _count_skips(self, applied: bool, grad_norm: float) -> None:
        state, limit = self.state, self.config.optim.max_skipped
        state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1
        if applied:
            return
        state.skipped_steps += 1
        self.view.say(
            f"step {state.step}: gradient norm is {grad_norm}; step skipped ({state.skipped_in_a_row} in a row)"
        )
        if state.skipped_in_a_row > limit:
            self.saver.wait()
            kept = self.store.latest()
            raise TrainingError(
                f"step {state.step}: {state.skipped_in_a_row} non-finite steps in a row (optim.max_skipped={limit}). "
                f"Lower optim.lr, set optim.clip_grad_norm=1.0 or engine.precision=fp32; the last good checkpoint is {kept}."
            )

    def _evaluate(self) -> None:
        """Score this step, unless that was done before a resume."""
        evaluate, step = self.evaluate, self.state.step
        if evaluate is None or step in self._evaluated:
            return
        self._beat("evaluating")
        with self.engine.whole() as objective:
            scores = self.ranks.first(lambda: evaluate(cast(Objective, objective), step))
        if self.log is not None:
            self.log.write("eval", step, scores)
        self._evaluated.add(self.state.step)
        self.meter.start()

    def save(self) -> None:
        """Begin to write a checkpoint of everything that training depends on."""
        state = self.state
        self._beat("saving")
        cursors = self.ranks.gather(state.cursor)
        meta = {
            "samples": state.samples,
            "skipped_steps": state.skipped_steps,
            "skipped_in_a_row": state.skipped_in_a_row,
            "cursor": Cursor.joined([cursor for cursor in cursors if cursor is not None]).to_json(),
            "world_size": self.ranks.size,
            "fingerprint": self.pipeline.fingerprint,
            "bad_samples": self.bad.state(),
            "total_steps": self.total_steps,
            **self._origin,
        }
        self.saver.save(state.step, self.engine.pieces(), meta)

    def _restore(self) -> None:
        newest = self.saver.newest(lambda meta, at: refuse_changed(meta["fingerprint"], self.pipeline.fingerprint, at))
        if newest is None:
            return
        path, meta, source = newest
        with self.ranks.alike():
            self.engine.load(source)
        self.state = State(
            meta["step"],
            meta["samples"],
            meta["skipped_steps"],
            meta["skipped_in_a_row"],
            Cursor(tuple(meta["cursor"])),
        )
        self.bad.load(meta["bad_samples"])
        self.view.say(f"continuing from {path} (step {self.state.step} of {self.total_steps})")
