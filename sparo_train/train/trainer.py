"""The loop: data, forward, backward, step, log, evaluate, save. It knows no method, no engine and no format by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..core import store
from ..core.contracts import Cursor, DataPipeline, Engine, Objective, Progress
from ..core.errors import DataError, TrainingError
from ..core.metrics import MetricsLog, read
from ..core.rng import torch_seed
from ..core.rundir import RunDir
from ..core.signals import StopFlag
from ..data.budget import BadSampleBudget
from ..data.sources import refuse_changed
from .accumulate import gradients
from .run import RunConfig

Evaluate = Callable[[Objective, int], dict[str, Any]]  # scores by task, for metrics.jsonl


class View(Protocol):
    """Shows a human what happens."""

    def update(self, step: int, total: int, facts: dict[str, float]) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass
class State:
    """What the loop carries from step to step, beside the engine's own state."""

    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    cursor: Cursor | None = None


@dataclass(frozen=True)
class Outcome:
    """Why the loop ended: `finished`, `stop_after_steps`, or a signal's name; and where."""

    reason: str
    step: int
    checkpoint: Path | None


class Trainer:
    """One run on one engine.

    Args:
        config: the resolved recipe.
        rundir: opened for training.
        engine, objective, pipeline: what to train with.
        total_steps: the length of the schedule.
        view: where progress is shown.
        evaluate: called every `eval.every_steps` and at the end; None: no evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDir,
        engine: Engine,
        objective: Objective,
        pipeline: DataPipeline,
        total_steps: int,
        view: View,
        evaluate: Evaluate | None = None,
    ):
        self.config, self.rundir, self.engine, self.objective = config, rundir, engine, objective
        self.pipeline, self.total_steps, self.view, self.evaluate = pipeline, total_steps, view, evaluate
        self.state = State()
        self.bad = BadSampleBudget(config.data.max_bad_share, config.data.max_bad_share_after)
        self.store = store.CheckpointStore(
            rundir.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_every
        )
        self.meter = Meter()

    def fit(self) -> Outcome:
        """Train from the newest complete checkpoint (or the start) to the end, a signal, or an error.

        Raises:
            TrainingError: too many non-finite steps in a row.
            DataError: too many bad samples, or a data set that changed since the checkpoint.
            CheckpointError: a checkpoint that cannot be read or written.
        """
        self.engine.prepare(self.objective)
        torch.manual_seed(torch_seed(self.config.seed, "train"))
        self._restore()
        self.log = MetricsLog(self.rundir.path, self.state.step, self.config.log.wandb, self.config.log.tensorboard)
        self._evaluated = {record["step"] for record in read(self.log.path, "eval")}
        end = min(self.total_steps, self.config.stop_after_steps or self.total_steps)
        try:
            with StopFlag() as stop:
                self._loop(end, stop)
                return self._end(stop)
        except DataError:
            self._keep()
            raise
        finally:
            self.log.close()

    def _loop(self, end: int, stop: StopFlag) -> None:
        state, every, saved = self.state, self.config.checkpoint, time.monotonic()
        with closing(self.pipeline.start(state.cursor)) as batches:  # an error must not leave loader workers behind
            self.meter.start()
            while True:
                if self.config.eval.every_steps and state.step and state.step % self.config.eval.every_steps == 0:
                    self._evaluate()
                if state.step >= end or stop.received is not None:
                    return
                with self.meter.waiting():
                    delivery = next(batches)
                self._step(delivery)
                due = every.every_steps and state.step % every.every_steps == 0
                late = every.every_minutes and time.monotonic() - saved > 60 * every.every_minutes
                if (due or late) and state.step < end:
                    self.save()
                    saved = time.monotonic()

    def _end(self, stop: StopFlag) -> Outcome:
        step = self.state.step
        reason = stop.received or ("finished" if step >= self.total_steps else "stop_after_steps")
        path = self._keep()
        self.rundir.beat(step=step, phase=reason)
        if reason == "finished":
            self._evaluate()
        return Outcome(reason, step, path)

    def _keep(self) -> Path | None:
        """The checkpoint of this very step, written now if need be; None before the first."""
        return (self.store.steps().get(self.state.step) or self.save()) if self.state.step else None

    def _step(self, delivery: Any) -> None:
        state, size = self.state, self.config.batch_size
        self.bad.add(delivery.skipped, state.samples + size)
        progress = Progress(state.step, self.total_steps, state.samples)
        loss = gradients(self.engine, self.objective, delivery.batch, progress, self.config.micro_batch)
        report = self.engine.step(progress)
        state.step, state.samples, state.cursor = state.step + 1, state.samples + size, delivery.cursor
        self._count_skips(report.applied, report.grad_norm)
        self.meter.add(size)
        if self.meter.beat_due(self.config.log.heartbeat_seconds):
            self.rundir.beat(step=state.step, phase="training")
        if state.step % self.config.log.every_steps == 0 or state.step == self.total_steps:
            facts = {name: float(value) for name, value in loss.metrics.items()}
            facts |= {"lr": report.lr, "grad_norm": report.grad_norm, **self.meter.take()}
            self.view.update(state.step, self.total_steps, facts)
            skipped: dict[str, Any] = {"skipped_steps": state.skipped_steps}
            if self.bad.counts:
                skipped |= {"bad_samples": self.bad.by_reason(), "bad_shards": self.bad.by_shard()}
            self.log.write("train", state.step, {"samples": state.samples, **facts, **skipped})

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
            kept = self.store.latest()
            raise TrainingError(
                f"step {state.step}: {state.skipped_in_a_row} non-finite steps in a row (optim.max_skipped={limit}). "
                f"Lower optim.lr, set optim.clip_grad_norm=1.0 or engine.precision=fp32; the last good checkpoint is {kept}."
            )

    def _evaluate(self) -> None:
        """Score this step, unless that was done before a resume."""
        if self.evaluate is None or self.state.step in self._evaluated:
            return
        self.rundir.beat(step=self.state.step, phase="evaluating")
        self.objective.eval()
        scores = self.evaluate(self.objective, self.state.step)
        self.objective.train()
        self.log.write("eval", self.state.step, scores)
        self._evaluated.add(self.state.step)
        self.meter.start()

    def save(self) -> Path:
        """Write a checkpoint of everything that training depends on."""
        state = self.state
        self.rundir.beat(step=state.step, phase="saving")
        meta = {
            "samples": state.samples,
            "skipped_steps": state.skipped_steps,
            "skipped_in_a_row": state.skipped_in_a_row,
            "cursor": state.cursor.to_json() if state.cursor else None,
            "fingerprint": self.pipeline.fingerprint,
            "bad_samples": self.bad.state(),
            "total_steps": self.total_steps,
            "objective": self.config.objective.kind,
        }
        path = self.store.save(state.step, self.engine.state_dict(), meta)
        self.meter.start()
        return path

    def _restore(self) -> None:
        path = self.store.latest()
        if path is None:
            return
        meta = store.read_meta(path)
        refuse_changed(meta["fingerprint"], self.pipeline.fingerprint, str(path))
        self.engine.load_state_dict({part: store.read_part(path, part) for part in ("model", "optimizer", "random")})
        self.state = State(
            meta["step"],
            meta["samples"],
            meta["skipped_steps"],
            meta["skipped_in_a_row"],
            Cursor(tuple(meta["cursor"])),
        )
        self.bad.load(meta["bad_samples"])
        self.view.say(f"continuing from {path} (step {self.state.step} of {self.total_steps})")


class Meter:
    """Samples per second and the share of time spent waiting for data, between two calls of `take`."""

    def __init__(self) -> None:
        self.start()
        self._beat = 0.0

    def start(self) -> None:
        self._since, self._waited, self._samples = time.monotonic(), 0.0, 0

    def waiting(self) -> _Stopwatch:
        return _Stopwatch(self)

    def add(self, samples: int) -> None:
        self._samples += samples

    def take(self) -> dict[str, float]:
        spent = max(time.monotonic() - self._since, 1e-9)
        out = {"samples_per_second": self._samples / spent, "data_wait": self._waited / spent}
        self.start()
        return out

    def beat_due(self, seconds: float) -> bool:
        now = time.monotonic()
        due = now - self._beat >= seconds
        if due:
            self._beat = now
        return due


class _Stopwatch:
    def __init__(self, meter: Meter):
        self.meter = meter

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.meter._waited += time.monotonic() - self._begin
