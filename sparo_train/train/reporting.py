"""Reports of a run: metrics, terminal lines, the heartbeat, and scores of evaluated steps."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.accelerator import available_device
from ..core.contracts import Batch, DataPipeline, Engine, Loss, Objective, StepReport
from ..core.disk.metrics import RESERVED, MetricsLog, read
from ..core.disk.rundir import RunDir
from ..core.distributed import Ranks
from ..core.errors import CollapseError, SparoError, StoppedError, TrainingError, UnexpectedError
from .meter import FlopCounter, Meter, MetricExchange, RunClock, average_over_ranks, memory, utilisation
from .run_config import EvalConfig, LogConfig, ProfileConfig
from .state import Display, Evaluate

logger = logging.getLogger(__name__)

_COLLECT_EVERY = 50  # steps
_RESERVED = {"kind", "step", "loss", "lr", "grad_norm"}  # keys of every record of metrics.jsonl


class Reporter:
    """Writer of metrics at log steps, averaged over ranks.

    Args:
        flops: counts a sample's model FLOPs; None: they are not logged.
    """

    def __init__(
        self,
        config: LogConfig,
        rundir: RunDir,
        ranks: Ranks,
        engine: Engine,
        display: Display,
        flops: FlopCounter | None,
    ):
        self.config, self.rundir, self.ranks, self.engine, self.display = config, rundir, ranks, engine, display
        self.flops, self.meter = flops, Meter()
        self._exchange = MetricExchange(ranks)
        self._log: MetricsLog | None = None
        self._unhealthy = False
        self._odd: set[str] = set()  # metrics that are not numbers, which were reported once

    def open(self, after_step: int) -> set[int]:
        """On rank 0, continue metrics.jsonl after this step; return the steps that are already evaluated."""
        c = self.config
        self._log = MetricsLog(self.rundir.path, after_step, c.wandb, c.tensorboard, self.rundir.lease.check)
        return {record["step"] for record in read(self._log.path, "eval")}

    def step(
        self, step: int, total_steps: int, loss: Loss, report: StepReport, batch: Batch, objective: Objective
    ) -> dict[str, Any]:
        """Log the metrics of a step, equal on every rank; the host waits for the device here."""
        own = self._numbers({**loss.metrics, **self._log_metrics(objective)}) | {"loss": float(loss.total)}
        # After the float() above, because only then has the device finished the timed work.
        own |= self.meter.take()
        own |= {"memory": memory(self.engine.device), "forward_seconds": self.engine.device_context.clock.take()}
        facts = average_over_ranks(self._exchange.gather(own)) | {"lr": report.lr, "grad_norm": float(report.grad_norm)}
        facts |= {f"grad_norm_{part}": float(norm) for part, norm in report.norms.items()}
        self._check_health(objective, step, facts)
        facts |= self._speed(batch, facts["samples_per_second"])
        self.display.update(step, total_steps, facts)
        return facts

    def _log_metrics(self, objective: Objective) -> Mapping[str, Any]:
        try:
            return objective.log_metrics()
        except Exception as error:  # as in _check_health
            if "log_metrics" not in self._odd:
                self._odd.add("log_metrics")
                logger.warning(
                    f"the objective's log_metrics failed ({type(error).__name__}: {error}). Its metrics are omitted."
                )
            return {}

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return metrics as numbers. One that is not a number (a vector) is reported once and skipped, so that reporting never ends a run."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            if name in _RESERVED:
                if name not in self._odd:
                    self._odd.add(name)
                    logger.warning(
                        f"metric {name!r} is omitted, because sparo uses this name itself. Rename it in the objective."
                    )
                continue
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                if name not in self._odd:
                    self._odd.add(name)
                    logger.warning(f"metric {name!r} is omitted, because it is not a single number ({error})")
        return numbers

    def first_batch(self, pipeline: DataPipeline, batch: Batch) -> None:
        """Show the first batch as the model receives it, and statistics of its pixels."""
        if self.ranks.rank == 0 and (text := pixel_statistics(batch)):
            logger.info(text)
        if self._log is not None and self.config.samples:
            self._log.samples(lambda: pipeline.preview(batch, self.config.samples))

    def done(self, step: int, total_steps: int, clock: RunClock, report: StepReport) -> None:
        """Record a finished step; the first of a start is shown at once."""
        self.without_gradient(report.without_gradient)
        if clock.step(step):
            self.show_progress(step, total_steps, clock)

    def show_progress(self, step: int, total_steps: int, clock: RunClock) -> None:
        """Show the progress without waiting for the device."""
        self.display.show_progress(step, total_steps, clock.elapsed, clock.seconds_left(step, total_steps))

    def without_gradient(self, names: Sequence[str]) -> None:
        """Report trainable parameters that the loss does not reach, which keep their initial values."""
        if names and self.ranks.rank == 0:
            listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            logger.warning(
                f"{len(names)} trainable parameter(s) get no gradient and keep their initial values: {listed}. Freeze them, or check the loss."
            )

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a record to metrics.jsonl, on rank 0."""
        if self._log is not None:
            self._log.write(kind, step, values)

    def beat(self, step: int, total_steps: int, phase: str) -> None:
        """Update the heartbeat with the activity of the run, for observers of its folder."""
        if self.ranks.rank == 0:
            self.rundir.write_heartbeat(step=step, total=total_steps, phase=phase)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _check_health(self, objective: Objective, step: int, facts: dict[str, float]) -> None:
        """Log a health problem of the objective once until it is over; `alarm` in the metrics is 1 while it lasts."""
        try:
            problem = objective.check_health(facts)
        except CollapseError:
            raise  # on all ranks, because the facts are averages
        except Exception as error:  # errors of a plug-in's objective must not end the run while it is only reporting
            problem = f"check_health of the objective failed ({type(error).__name__}: {error})"
        if problem is not None and not self._unhealthy:
            logger.warning(f"step {step}: {problem}")
        self._unhealthy = problem is not None
        # In every record while it lasts, so that a curve shows when it began.
        if self._unhealthy:
            facts["alarm"] = 1.0

    def _speed(self, batch: Batch, samples_per_second: float) -> dict[str, float]:
        """Return model FLOP/s of one rank, and their share of its device's peak if known."""
        if self.flops is None:
            return {}
        try:
            rate = self.flops.per_sample(batch) * samples_per_second / self.ranks.size
        except Exception as error:  # some operations cannot be traced without data, and fail in various ways
            self.flops = None
            first = str(error).partition("\n")[0][:200]
            logger.warning(
                f"model FLOPs cannot be counted ({type(error).__name__}: {first}); tflops and mfu are omitted. log.flops=false hides this warning."
            )
            return {}
        # Per device, as in published figures.
        share = utilisation(rate, self.engine.device)
        return {"tflops": rate / 1e12} | ({} if share is None else {"mfu": share})


def pixel_statistics(batch: Batch) -> str:
    """Return a line about the pixels (uint8) of a batch's images, empty without images. A wrong range is the most common mistake."""
    image = batch.get("image")
    if not isinstance(image, torch.Tensor) or image.dtype != torch.uint8 or not image.numel():
        return ""
    low, high, mean = int(image.min()), int(image.max()), float(image.float().mean())
    line = f"first batch: pixels from {low} to {high}, mean {mean:.1f}"
    if high < 64:
        return f"{line}. The images are nearly black. If they are 16-bit images that use only a small range of values, set data.pixel_range."
    return f"{line}. Nearly white: check data.pixel_range." if low > 192 else line


class Collector:
    """Garbage collection at chosen steps. Automatic collection stops one rank at a time, and the others wait for it."""

    def __enter__(self) -> Collector:
        # A test or notebook may have disabled it already.
        self._before = gc.isenabled()
        gc.collect()
        gc.disable()
        return self

    def step(self, step: int) -> None:
        """Collect young objects, on every rank after the same step."""
        if step % _COLLECT_EVERY == 0:
            gc.collect(1)

    def collect_all(self) -> None:
        """Collect everything, after work that creates many objects and takes long anyway (an evaluation)."""
        gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._before:
            gc.enable()


_PROFILED = {"cuda": torch.profiler.ProfilerActivity.CUDA, "xpu": torch.profiler.ProfilerActivity.XPU}


class Profile:
    """Trace of some steps of rank 0 in RUN/profile, for chrome://tracing or Perfetto."""

    def __init__(self, config: ProfileConfig | None, folder: Path):
        self._folder, self._running = folder, None
        if config is not None:
            self._guard(lambda: self._start(config))

    def _start(self, config: ProfileConfig) -> None:
        # Discard one warm-up step, which contains the start of the profiler itself.
        schedule = torch.profiler.schedule(wait=config.wait, warmup=1, active=config.steps, repeat=1)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [_PROFILED[kind] for kind in (available_device().type,) if kind in _PROFILED]
        self._running = torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=self._write)
        self._running.start()

    def _write(self, profiler: Any) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info(f"log.profile: wrote {path}")

    def step(self) -> None:
        """Advance the profiler after a step."""
        if self._running is not None:
            self._guard(self._running.step)

    def close(self) -> None:
        if self._running is not None:
            self._guard(self._running.stop)

    def _guard(self, call: Callable[[], Any]) -> None:
        # Catch everything, because a trace must not end the run.
        try:
            call()
        except Exception as error:  # a failing profiler must not end the run
            self._running = None
            logger.warning(f"log.profile: failed ({type(error).__name__}: {error}). The run continues without a trace.")


def _refuse_unwritable(scores: object) -> None:
    """Raise `TrainingError` if a function of the calling program returned something else than scores by name."""
    if not isinstance(scores, Mapping):
        raise TrainingError(f"evaluate: expected a dictionary of scores by task, got {type(scores).__name__}")
    if reserved := sorted(RESERVED & set(scores)):
        raise TrainingError(
            f"evaluate: {reserved[0]!r} has another meaning in metrics.jsonl. Return it by another name."
        )


class Evaluation:
    """Evaluation of steps, once each, however often the run is stopped and resumed.

    Args:
        evaluate: scores the objective; None: nothing is evaluated.
        schedule: when to evaluate.
    """

    def __init__(
        self, evaluate: Evaluate | None, schedule: EvalConfig, engine: Engine, ranks: Ranks, reporter: Reporter
    ):
        self.evaluate, self.schedule, self.engine, self.ranks, self.reporter = (
            evaluate,
            schedule,
            engine,
            ranks,
            reporter,
        )
        self.scored: set[int] = set()
        self._started = time.monotonic()
        self._postponed = False  # an evaluation was skipped
        self._durations: list[float] = []  # seconds of the evaluations of this process

    def due(self, step: int) -> bool:
        """Return whether this step is to be evaluated now: it has no scores yet, and `max_share` allows another evaluation."""
        every = self.schedule.every_steps
        if not (every and step and step % every == 0 and self.missing_tasks(step)):
            return False
        # Clocks of ranks differ, so rank 0 decides.
        if self.schedule.max_share is None or self.ranks.rank0_broadcast(self._affordable):
            return True
        if not self._postponed:
            logger.info(
                f"step {step}: evaluation skipped, because evaluations would take more than the share "
                "eval.max_share of the time. Evaluations resume when they fit into this share."
            )
        self._postponed = True
        return False

    def _affordable(self) -> bool:
        """Return whether another evaluation like the last one would stay within the share."""
        if not self._durations or self.schedule.max_share is None:
            return True
        expected = self._durations[-1]
        total = time.monotonic() - self._started + expected
        return sum(self._durations) + expected <= self.schedule.max_share * total

    def missing_tasks(self, step: int) -> bool:
        return self.evaluate is not None and step not in self.scored

    def run(self, step: int) -> str | None:
        """Evaluate this step. If a signal interrupts it, return the signal and write no record, so that the resumed run begins with it."""
        evaluate, begin = self.evaluate, time.monotonic()
        assert evaluate is not None
        # Evaluation runs uncompiled: its scores are those of `sparo eval`, and batches of other sizes would have to be compiled again.
        with self.engine.full_model() as objective, torch.compiler.set_stance("force_eager"):
            try:
                scores = evaluate(objective, step, self.ranks)  # each rank scores its share
                _refuse_unwritable(scores)
            except StoppedError as stopped:
                return stopped.signal
            except SparoError:
                raise
            except Exception as error:  # of the calling program: the state is saved, as after other errors
                raise TrainingError(f"evaluate: step {step}: {UnexpectedError.from_error(error)}") from error
        self.reporter.write("eval", step, scores)
        # After the record: a step whose evaluation was interrupted is evaluated again.
        self.scored.add(step)
        self._durations.append(time.monotonic() - begin)
        return None
