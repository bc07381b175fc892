"""The recipe: every key a run has, and what follows from it, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ..core.config import Frozen, Tree, free, load_recipe, override, resolve
from ..core.errors import ConfigError
from ..core.plugins import Open, Table
from ..core.tables import ENGINES, METHODS, TASKS
from ..data.read.sources import DataConfig
from ..engine.optim import OptimConfig

TaskConfig = Annotated[Any, Open(TASKS, key="task")]  # one entry of `eval.tasks`


class CheckpointConfig(Frozen):
    """A checkpoint is written every so many steps, every so many minutes (whichever comes first), on a signal, and at the end."""

    every_steps: int = Field(default=1000, ge=0, description="0: not by steps")
    every_minutes: float = Field(default=30.0, ge=0, description="0: not by time")
    keep_last: int = Field(default=2, ge=1, description="the newest so many stay")
    keep_every: int = Field(default=0, ge=0, description="and those of every so many steps; 0: none")
    background: bool = Field(default=True, description="training goes on while it is written")


class ProfileConfig(Frozen):
    """Steps whose trace goes to RUN/profile, counted from this start; the first of a process are not like the others."""

    wait: int = Field(default=5, ge=0, description="steps before it")
    steps: int = Field(default=3, gt=0, description="steps in it")


class LogConfig(Frozen):
    """What a run says of itself. Nothing here changes what it computes."""

    every_steps: int = Field(default=20, gt=0, description="steps between records of metrics.jsonl")
    tensorboard: bool = Field(default=True, description="the same numbers in RUN/tensorboard")
    wandb: str | None = Field(default=None, description="the same numbers to this project of Weights & Biases")
    heartbeat_seconds: float = Field(default=10.0, gt=0, description="between two looks at what the run is doing")
    flops: bool = Field(default=True, description="count model FLOPs (tflops, mfu)")
    profile: ProfileConfig | None = Field(default=None, description="trace some steps of rank 0 with torch's profiler")


class SideEvalConfig(Frozen):
    """Tasks too long to wait for: a job of its own scores the weights of every evaluated step."""

    on: str = Field(description="a cluster, as `sparo launch --on`")
    tasks: dict[str, TaskConfig] = Field(min_length=1, description="as eval.tasks")
    options: tuple[str, ...] = Field(
        default=(), description='the cluster\'s `--key value` options: [--gpus-per-node, "1"]'
    )


class EvalConfig(Frozen):
    """What is scored, and when."""

    every_steps: int = Field(default=0, ge=0, description="0: only at the end")
    tasks: dict[str, TaskConfig] = Field(default_factory=dict, description="by name, each a row of sparo.tasks")
    side: SideEvalConfig | None = Field(default=None, description="tasks that a job of its own scores meanwhile")


def _default(table: Table, name: str) -> Any:
    return table.row(name).config()


class RunConfig(Frozen):
    """A whole recipe. Exactly one of `steps`, `epochs`, `samples` says how long it trains."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the run folder")
    out: str = Field(default="runs", description="where run folders are")
    seed: int = Field(default=0, ge=0, description="of everything that is drawn")
    batch_size: int = Field(gt=0, description="samples per optimizer step, of all ranks together")
    world_size: int | None = free(None, "ranks it must be started with; default: any that share the streams", gt=0)
    micro_batch_size: int | None = free(
        None,
        "samples per forward and rank; default: all of the rank's; gradients are those of the whole batch either way",
        gt=0,
    )
    steps: int | None = Field(default=None, gt=0, description="optimizer steps")
    epochs: float | None = Field(default=None, gt=0, description="passes over the data, weights counted")
    samples: int | None = Field(default=None, gt=0, description="samples in all")
    samples_per_epoch: int | None = Field(
        default=None, gt=0, description="where a paper's epoch is a number; default: what the sources hold"
    )
    stop_after_steps: int | None = free(None, "stop there, saved, as if the schedule went on: for trials", gt=0)
    objective: Annotated[Any, Open(METHODS, default="clip")] = Field(
        default_factory=lambda: _default(METHODS, "clip"), description="what is trained: a row of sparo.methods"
    )
    data: DataConfig = Field(description="what is read, in which order")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer and schedules")
    engine: Annotated[Any, Open(ENGINES, default="local")] = Field(
        default_factory=lambda: _default(ENGINES, "local"), description="what it runs on: a row of sparo.engines"
    )
    checkpoint: CheckpointConfig = free(CheckpointConfig(), "when checkpoints are written, and which stay")
    log: LogConfig = free(LogConfig(), "what the run says of itself")
    eval: EvalConfig = free(EvalConfig(), "what is scored, and when")

    @model_validator(mode="after")
    def _one_length(self) -> RunConfig:
        given = [k for k in ("steps", "epochs", "samples") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, epochs, samples (given: {', '.join(given) or 'none'})")
        return self

    @model_validator(mode="after")
    def _fits_method(self) -> RunConfig:
        METHODS.row(self.objective.kind).rules(self)
        return self

    def micro_batch(self, world_size: int) -> int:
        """Samples per forward and rank."""
        own = self.batch_size // world_size
        return min(self.micro_batch_size or own, own)

    @property
    def folder(self) -> Path:
        return Path(self.out) / self.name

    def total_steps(self, epoch_size: int) -> int:
        """Optimizer steps of the run; `epoch_size` is what the sources hold, weights counted."""
        if self.steps is not None:
            total = self.steps
        elif self.samples is not None:
            total = self.samples // self.batch_size
        else:
            total = int((self.epochs or 0) * (self.samples_per_epoch or epoch_size)) // self.batch_size
        if total < 1:
            raise ConfigError(f"steps/epochs/samples: shorter than one batch of {self.batch_size}")
        if self.optim.warmup_steps >= total:
            raise ConfigError(
                f"optim.warmup_steps={self.optim.warmup_steps} is not below the run's {total} steps; shorten it or train longer"
            )
        return total

    def steps_per_epoch(self, epoch_size: int) -> int:
        """Whole batches in an epoch, at least one; what schedules by epoch count in."""
        return max(1, (self.samples_per_epoch or epoch_size) // self.batch_size)


def load_run(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe with its parents and overrides. Raises `ConfigError`."""
    tree: Tree = override(load_recipe(path), overrides or [])
    tree.setdefault("name", Path(path).stem)
    return resolve(RunConfig, tree, str(path))
