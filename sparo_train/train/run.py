"""The recipe: every key a run has, and what follows from it, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ..core.config import Frozen, Tree, load_recipe, override, resolve
from ..core.errors import ConfigError
from ..core.plugins import Open, Table
from ..core.tables import ENGINES, METHODS, TASKS
from ..data.read.sources import DataConfig
from ..engine.optim import OptimConfig

TaskConfig = Annotated[Any, Open(TASKS, key="task")]  # one entry of `eval.tasks`


class CheckpointConfig(Frozen):
    """A checkpoint is written every so many steps, every so many minutes (whichever comes first), on a signal, and at the end.

    `background`: training goes on while it is written; false waits for it.
    """

    every_steps: int = Field(default=1000, ge=0)
    every_minutes: float = Field(default=30.0, ge=0)
    keep_last: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)
    background: bool = True


class LogConfig(Frozen):
    every_steps: int = Field(default=20, gt=0)
    tensorboard: bool = True
    wandb: str | None = None
    heartbeat_seconds: float = Field(default=10.0, gt=0)


class SideEvalConfig(Frozen):
    """Tasks too long to wait for: a job of its own scores the weights of every evaluated step.

    `on`: a cluster, as `sparo launch --on`.  `options`: its `--key value` options, e.g. [--gpus-per-node, "1"].
    """

    on: str
    tasks: dict[str, TaskConfig] = Field(min_length=1)
    options: tuple[str, ...] = ()


class EvalConfig(Frozen):
    """Scored every `every_steps` and at the end; 0: only at the end. `side`: tasks that a job of its own scores meanwhile."""

    every_steps: int = Field(default=0, ge=0)
    tasks: dict[str, TaskConfig] = Field(default_factory=dict)
    side: SideEvalConfig | None = None


def _default(table: Table, name: str) -> Any:
    return table.row(name).config()


class RunConfig(Frozen):
    """A whole recipe. Exactly one of `steps`, `epochs`, `samples` says how long it trains."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    out: str = "runs"
    seed: int = Field(default=0, ge=0)
    batch_size: int = Field(gt=0)
    world_size: int | None = Field(
        default=None, gt=0
    )  # ranks it must be started with; None: any that share the streams
    # samples per forward and rank; None: all of the rank's. Gradients are those of the whole batch either way (train/accumulate.py).
    micro_batch_size: int | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, gt=0)
    epochs: float | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    samples_per_epoch: int | None = Field(
        None, gt=0
    )  # where a paper's epoch is a number; default: what the sources hold
    stop_after_steps: int | None = Field(
        default=None, gt=0
    )  # stop there, saved, as if the schedule went on: for trials
    objective: Annotated[Any, Open(METHODS, default="clip")] = Field(default_factory=lambda: _default(METHODS, "clip"))
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    engine: Annotated[Any, Open(ENGINES, default="local")] = Field(default_factory=lambda: _default(ENGINES, "local"))
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    eval: EvalConfig = EvalConfig()

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
