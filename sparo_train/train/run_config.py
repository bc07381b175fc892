"""The recipe: all keys of a run, and values derived from them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..core.config import Frozen, field, resolve, resumable_field
from ..core.disk.metrics import RESERVED
from ..core.errors import ConfigError
from ..core.files import suggest_path
from ..core.recipe.layers import Tree, is_sweep, load_recipe, override
from ..core.registries import ENGINES, METHODS, OPTIMIZERS, TASKS
from ..core.registry import FromRegistry, Registry
from ..data.sources.base import DataConfig
from ..data.sources.detect import source_block
from ..engine.optim import AdamWConfig, OptimConfig
from ..objectives.method import Choice
from .choices import with_choices

TaskConfig = Annotated[Any, FromRegistry(TASKS, key="task")]  # one entry of `eval.tasks`


def _source_at(place: str) -> dict[str, Any]:
    """Return the source that `data=PLACE` stands for. Raises `ConfigError` if a path without wildcards does not exist."""
    path = Path(place)
    if not path.exists() and not any(mark in place for mark in ("://", "::", "*", "{", "[")):
        raise ConfigError(f"data={place}: no such file or folder; {suggest_path(path)}")
    return source_block([place])


class CheckpointConfig(Frozen):
    """Checkpoints are written at step and time intervals (whichever comes first), on a signal, and at the end."""

    every_steps: int = field(1000, "Steps between checkpoints. 0: steps do not trigger checkpoints.", ge=0)
    every_minutes: float = field(30.0, "Minutes between checkpoints. 0: time does not trigger checkpoints.", ge=0)
    keep_last: int = field(2, "Number of newest checkpoints to keep.", ge=1)
    keep_every: int = field(0, "Also keep every checkpoint whose step is a multiple of this. 0: none.", ge=0)
    background: bool = field(True, "Continue training while a checkpoint is written.")
    fall_back: bool = field(
        False, "If the newest checkpoint is damaged, resume from the previous one. false: end with an error."
    )


class ProfileConfig(Frozen):
    """Steps whose trace goes to RUN/profile, counted from this start."""

    wait: int = field(5, "Steps before the profile.", ge=0)
    steps: int = field(3, "Steps to profile.", gt=0)


class LogConfig(Frozen):
    """Logging. These keys do not change the computation."""

    every_steps: int = field(20, "Steps between records of metrics.jsonl.", gt=0)
    tensorboard: bool = field(True, "Also write metrics to RUN/tensorboard.")
    wandb: str | None = field(None, "Also send metrics to this Weights & Biases project.", examples=["sparo"])
    heartbeat_seconds: float = field(10.0, "Seconds between updates of the heartbeat file.", gt=0)
    samples: int = field(
        8, "Images of the first batch, with captions, shown in tensorboard and wandb. 0: none.", ge=0, le=256
    )
    pictures: int = field(
        6,
        "Number of samples for which every evaluation saves pictures to RUN/pictures and tensorboard. The samples "
        "come from the first task that has pictures. Limits: 3 for videos, 1 for scenes. 0: no pictures.",
        ge=0,
        le=256,
    )
    flops: bool = field(True, "Count model FLOPs and report tflops and mfu.")
    profile: ProfileConfig | None = field(None, "Trace some steps of rank 0 with torch's profiler. Default: no trace.")


class EvalJobConfig(Frozen):
    """Long tasks that run in a separate job, which scores the weights of every evaluated step."""

    cluster: str = field(..., "Cluster name, as in `sparo launch --cluster`.", examples=["slurm"])
    tasks: dict[str, TaskConfig] = field(..., "Tasks by name; each is an entry of sparo.tasks.", min_length=1)
    options: tuple[str, ...] = field(
        (), 'Options of the cluster, as a list of `--key` and value: [--gpus-per-node, "1"].'
    )


class EvalConfig(Frozen):
    """Evaluation tasks and their schedule."""

    every_steps: int = field(0, "Steps between evaluations. 0: only at the end.", ge=0)
    max_share: float | None = field(
        None,
        "Evaluations may take at most this share of the time since the start of the process. An evaluation that is "
        "due by every_steps is skipped if the total would exceed this share. The first evaluation and the one after "
        "the last step always run. Default: no evaluation is skipped.",
        gt=0,
        lt=1,
        examples=[0.05],
    )
    tasks: dict[str, TaskConfig] = Field(
        default_factory=dict, description="Tasks by name; each is an entry of sparo.tasks."
    )

    @field_validator("tasks")
    @classmethod
    def _refuse_reserved_names(cls, tasks: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(RESERVED & set(tasks)):
            raise ValueError(f"{reserved[0]}: the name has another meaning in metrics.jsonl. Choose another name.")
        return tasks

    job: EvalJobConfig | None = field(None, "Tasks that a separate job scores while training continues. Default: none.")


def _default(table: Registry, name: str) -> Any:
    return table.get(name).config()


class StartConfig(Frozen):
    """Initial weights of a run. Once the run has its own checkpoint, it continues from that."""

    checkpoint: str = field(
        ...,
        "Anything that `sparo eval` loads: a run, one of its checkpoints, an export, a weight file, open_clip:NAME@FILE.",
        examples=["runs/clip"],
    )
    allow_missing: tuple[str, ...] = field(
        (),
        "Parameters of the run that may be missing from the checkpoint, given as patterns of their names, such as [model.visual.sparo.*].",
        strict=False,
    )
    allow_unused: tuple[str, ...] = field(
        (),
        "Patterns of parameter names. A checkpoint parameter that matches a pattern is ignored if the run does not have this parameter.",
        strict=False,
    )
    optimizer: bool = field(
        False,
        "Also load the optimizer state and the position in the data, to branch off from a run of the same model, "
        "for example with schedule=cooldown. false: load only the weights.",
    )


def _expand_path(value: Any) -> Any:
    """Return a path without `~` and environment variables. Raises `ValueError` for a variable that is not set."""
    if not isinstance(value, str) or not value:
        return value
    try:
        expanded = os.path.expandvars(Path(value).expanduser() if value.startswith("~") else value)
    except RuntimeError:
        raise ValueError("names the home folder of an unknown user. Write the path") from None
    if unset := re.search(r"\$\{?[A-Za-z_]\w*", expanded):
        raise ValueError(f"the environment variable {unset.group()} is not set. Set it, or write the path without it")
    return expanded


def _as_block(value: Any) -> Any:
    return {"checkpoint": value} if isinstance(value, str) else value


class RunConfig(Frozen):
    """A whole recipe. Exactly one of `steps`, `epochs`, `samples` gives the length of training."""

    alternatives: ClassVar[tuple[str, ...]] = ("steps", "epochs", "samples")
    # Short forms on the command line: `data=FOLDER`, `init=FILE`.
    short_forms: ClassVar[Mapping[str, Callable[[str], tuple[tuple[str, ...], Any]]]] = {
        "data": lambda place: (("data", "sources"), {"images": _source_at(place)}),
        "init": lambda place: (("start_from",), place),
    }

    name: str = resumable_field(..., "Name of the run folder.", min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    out: Annotated[str, BeforeValidator(_expand_path)] = resumable_field("runs", "Parent folder of run folders.")
    seed: int = field(0, "Random seed. All sampling derives from it.", ge=0, lt=1 << 63)
    batch_size: int = field(..., "Samples per optimizer step over all ranks.", gt=0, lt=1 << 31)
    world_size: int | None = resumable_field(
        None,
        "Number of ranks that this run must have. Default: any number that divides batch_size.",
        gt=0,
        examples=[8],
    )
    micro_batch_size: int | None = resumable_field(
        None,
        "Samples per forward pass and rank. Default: the rank's whole batch. Gradients are those of the whole batch "
        "in either case.",
        gt=0,
    )
    steps: int | None = field(None, "Length of training in optimizer steps.", gt=0, lt=1 << 53)
    epochs: float | None = field(
        None,
        "Length of training in passes over the data. In one pass, each source is read data.sources.NAME.weight times (twice if the weight is 2).",
        gt=0,
        le=1e9,
    )
    samples: int | None = field(None, "Length of training in samples.", gt=0, lt=1 << 63, examples=[1_280_000])
    samples_per_epoch: int | None = field(
        None,
        "Number of samples that count as one epoch, for papers that define an epoch by a number of samples. "
        "Default: the sum of size times weight over all sources.",
        gt=0,
    )
    stop_after_steps: int | None = resumable_field(
        None, "Save and stop after this step without changing the schedule, for trials.", gt=0, examples=[100]
    )
    start_from: Annotated[StartConfig | None, BeforeValidator(_as_block)] = resumable_field(
        None,
        "Initial weights: a checkpoint, or a block of keys (start_from.*). Default: random initialization.",
        examples=[{"checkpoint": "runs/clip"}],
    )
    freeze: tuple[str, ...] = field(
        (), "Patterns of parameters that are not trained, as in [model.text.*]. CLIP's towers also have a key `freeze`."
    )
    auto: Literal["off", "here", "cpu", "gpu"] = resumable_field(
        "off",
        "Choose sizes, length, learning rate and similar keys that the recipe does not set. The choice is based on "
        "the data, the initial weights and the hardware. The hardware is this machine (here), CPUs (cpu) or a GPU "
        "(gpu). `sparo train --print` shows the choices.",
    )
    objective: Annotated[Any, FromRegistry(METHODS, default="clip")] = Field(
        default_factory=lambda: _default(METHODS, "clip"), description="Training method: an entry of sparo.methods."
    )
    data: DataConfig = field(..., "Data sources and the order of samples.")
    optim: Annotated[OptimConfig, FromRegistry(OPTIMIZERS, default="adamw")] = Field(
        default_factory=AdamWConfig,
        description="Optimizer and schedules: an entry of sparo.optimizers.",
    )
    engine: Annotated[Any, FromRegistry(ENGINES, default="local")] = Field(
        default_factory=lambda: _default(ENGINES, "local"),
        description="Device and parallelism: an entry of sparo.engines.",
    )
    checkpoint: CheckpointConfig = resumable_field(
        CheckpointConfig(), "When checkpoints are written and which are kept."
    )
    log: LogConfig = resumable_field(LogConfig(), "Metrics, pictures and profiles.")
    eval: EvalConfig = resumable_field(EvalConfig(), "Evaluation tasks and when they run.")

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Return what `auto` chose when the recipe was loaded."""
        return ()

    @model_validator(mode="after")
    def _check_length(self) -> RunConfig:
        # Three keys for one quantity would have to agree, so exactly one is required.
        lengths = [k for k in self.alternatives if getattr(self, k) is not None]
        if len(lengths) != 1:
            raise ValueError(f"set exactly one of steps, epochs, samples (set: {', '.join(lengths) or 'none'})")
        return self

    @model_validator(mode="after")
    def _check_method_rules(self) -> RunConfig:
        # A method knows which keys of other blocks it needs; the recipe does not.
        method = METHODS.get(self.objective.kind)
        if self.data.bands is not None and not method.bands:
            raise ValueError(
                f"data.bands: does not apply to objective.kind={self.objective.kind}, which reads RGB images. Remove data.bands."
            )
        method.rules(self)
        return self

    def micro_batch(self, world_size: int) -> int:
        """Return the samples per forward and rank."""
        own = self.batch_size // world_size
        # A micro-batch larger than the rank's batch is the whole batch.
        return min(self.micro_batch_size or own, own)

    @property
    def folder(self) -> Path:
        return Path(self.out) / self.name

    def total_steps(self, epoch_size: int) -> int:
        """Return the optimizer steps of the run; `epoch_size` is the size of the sources with their weights."""
        if self.steps is not None:
            total = self.steps
        elif self.samples is not None:
            total = self.samples // self.batch_size
        else:
            # Rounded down, as in the code of both papers; in decimals, so that 0.58 of 200 is 116 and not 115.99….
            total = int(Decimal(str(self.epochs or 0)) * (self.samples_per_epoch or epoch_size)) // self.batch_size
        if total < 1:
            raise ConfigError(
                f"steps/epochs/samples: training is shorter than one batch of {self.batch_size} samples. Train longer."
            )
        if self.optim.warmup_steps >= total:
            raise ConfigError(
                f"optim.warmup_steps={self.optim.warmup_steps} must be below the {total} steps of the run. Shorten the warm-up, or train longer."
            )
        if self.optim.warmup_steps + (self.optim.cooldown_steps or 0) > total:
            raise ConfigError(
                f"optim.cooldown_steps={self.optim.cooldown_steps}: together with "
                f"optim.warmup_steps={self.optim.warmup_steps}, it exceeds the {total} steps of the run. Shorten one of them, or train longer."
            )
        return total

    def steps_per_epoch(self, epoch_size: int) -> int:
        """Return the whole batches in an epoch (at least one), the unit of schedules by epoch."""
        return max(1, (self.samples_per_epoch or epoch_size) // self.batch_size)


def load_run(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe with its parents and overrides. Raises `ConfigError`."""
    tree: Tree = load_recipe(path, RunConfig)
    if is_sweep(tree):
        raise ConfigError(
            f"{path}: is a sweep of {len(tree['runs'])} runs. Train them with `sparo launch train {path} --cluster local`."
        )
    tree = override(tree, overrides or [], RunConfig)
    choices: list[Choice] = []
    if tree.get("auto") is False:  # YAML 1.1 reads `off` as false
        tree["auto"] = "off"
    stored = Path(path).name == "config.yaml" and (Path(path).parent / "environment.json").is_file()
    if tree.get("auto", "off") != "off" and not stored:
        tree, choices = with_choices(tree)
    # Default to the file's name, so that two recipes in one folder do not share a run.
    tree.setdefault("name", Path(path).stem)
    origin = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    # The recipe of a run folder may have the key names of the version that wrote it.
    config = resolve(RunConfig, tree, origin, stored)
    # Not a field: two recipes with the same keys are equal, however their values came about.
    vars(config)["choices"] = tuple(choices)
    return config
