"""What the parts owe each other: the loop knows these and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .disk.metrics import Sample
from .disk.pieces import CheckpointReader, Pieces
from .ema import update_ema

Batch = Mapping[str, Tensor]
# For `Objective.after_step` where the host knows that the step was applied.
APPLIED = torch.tensor(True)


@dataclass(frozen=True)
class Progress:
    """Where training stands. `step` counts optimizer steps already taken; `steps_before`, those of the runs that this one is a branch of,
    which no schedule of its own sees.
    """

    step: int
    total_steps: int
    samples: int
    steps_per_epoch: int = 1
    steps_before: int = 0

    @property
    def epoch(self) -> int:
        """Whole epochs behind this step."""
        return self.step // self.steps_per_epoch


class Loss(NamedTuple):
    """`total`: 0-d tensor to back-propagate, logged as `loss`; `metrics`: what else to log, detached 0-d tensors by name."""

    total: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    `applied`: false where a non-finite gradient made the engine skip it; a 0-d bool tensor where the host did not wait to know.
    `grad_norm`, `norms`: the gradient's norm, and within each of the objective's parts: 0-d tensors on the device.
    `without_gradient`: names of trainable parameters that this step had no gradient for; filled in a process's first step only.
    """

    lr: float
    grad_norm: Tensor
    applied: bool | Tensor
    norms: dict[str, Tensor]
    without_gradient: tuple[str, ...] = ()


class Footprint(NamedTuple):
    """What a sample is to an objective, for estimates.

    tokens: per kind of input.  towers: (tokens * width, blocks) of everything that keeps activations for backward.
    encoding: numbers in one encoding.  loss: bytes that the loss of this rank's batch within the global batch holds.
    written: numbers that layers other than Transformer blocks write for a sample and keep.
    """

    tokens: dict[str, int]
    towers: list[tuple[int, int]]
    encoding: int
    loss: int
    written: int = 0


@dataclass(frozen=True)
class ParamGroups:
    """Parameters that the optimizer treats apart, by their names in the objective.

    no_decay: without weight decay.
    adamw_only: matrices that are not linear maps (queries, embeddings), which `optim.kind: muon` leaves to AdamW.
    unclipped: exempt from `optim.clip_per: tensor`.
    layer_ids: number of layers of its tower above a parameter, for `optim.layer_decay`; empty: the method has none.
    norm_groups: modules whose gradient norms are logged apart, by the name they are logged under.
    """

    no_decay: Collection[str] = ()
    adamw_only: Collection[str] = ()
    unclipped: Collection[str] = ()
    layer_ids: Mapping[str, int] = field(default_factory=dict)
    norm_groups: Mapping[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True)
class Follow:
    """A module that is a moving average of another one (an EMA teacher, an averaged copy).

    source: name of the module that it follows.  decay: name of the method `(progress) -> float`, the share of itself that it keeps.
    buffers: copy persistent buffers; False if the average updates its own.
    """

    source: str
    decay: str
    buffers: bool = True


class Objective(nn.Module, ABC):
    """A training method: its modules, its loss, and what happens after a step. It knows neither rank nor engine.

    Only `forward` is required. Three declarations cover most methods: `follows` (averages of weights), `param_groups` (what the optimizer
    treats apart) and `shard_units` (what engines compile and shard one by one).
    """

    # Averages by name of the module (an attribute), moved after every applied step. A name whose module is None is left out.
    follows: ClassVar[Mapping[str, Follow]] = {}
    # True if modules take inputs that 16 bits would blur (positions, poses): an engine with 16-bit weights passes inputs on unchanged.
    exact_inputs: ClassVar[bool] = False

    @abstractmethod
    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """The loss of this rank's batch; its mean over ranks is the global one. May count in buffers."""

    def shard_units(self) -> Sequence[nn.Module]:
        """Modules an engine wraps one by one (compile, shard), in forward order."""
        return []

    def remap_encoder_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the weights of an encoder are called in this objective, which `start_from` begins with; default: as there."""
        return dict(weights)

    def adapt_to_resolution(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of a run of this method for this one's image size; default: as they are."""
        return weights

    def refuse_length(self, total_steps: int) -> None:
        """Raise `ConfigError` where a schedule of this method's has a part that no step of the run reaches."""

    def on_weights_loaded(self) -> None:
        """Called once weights from elsewhere were given, before training."""

    def preprocess_batch(self, batch: Batch, progress: Progress) -> Batch:
        """What of a delivered batch this step looks at (smaller images early on); default: all of it, as it is."""
        return batch

    def param_groups(self) -> ParamGroups:
        """Return the parameters that the optimizer treats apart.

        Default: no weight decay for parameters of fewer than two dimensions, and AdamW for what modules list in `adamw_only_parameters`.
        """
        adamw_only = {
            f"{place}.{name}"
            for place, module in self.named_modules()
            for name in getattr(module, "adamw_only_parameters", ())
        }
        return ParamGroups({name for name, p in self.named_parameters() if p.ndim < 2}, adamw_only)

    def set_grad_checkpointing(self, enable: bool) -> None:
        """Recompute activations in backward, where the objective's modules support it."""
        raise ValueError(
            f"engine.grad_checkpointing: {type(self).__name__} has no blocks to checkpoint. Set it to false."
        )

    def loss_parameters(self) -> Sequence[nn.Parameter]:
        """Parameters used outside of `embed`, by the loss itself (temperature, bias)."""
        return []

    def frozen_this_step(self, progress: Progress) -> Sequence[nn.Parameter]:
        """Parameters that this step does not touch, weight decay included."""
        return []

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        """What is wrong with these averaged metrics, for a human; None where nothing is."""
        return None

    def footprint(self, batch: int, world_batch: int) -> Footprint | None:
        """Of a sample, in a rank's batch of `batch` out of `world_batch`, for estimates; None: it is not known."""
        return None

    def ema_pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter of an average in `follows` with the parameter it follows, element by element."""
        for name, follow in self.follows.items():
            if (average := getattr(self, name)) is not None:
                yield from zip(average.parameters(), getattr(self, follow.source).parameters(), strict=True)

    def after_step(self, progress: Progress, applied: Tensor) -> None:
        """Move the averages in `follows`, after every optimizer step. A method that overrides this (a center, a clamp) calls `super()`.

        Engines with weights in pieces may call it with pieces of `loss_parameters` and `ema_pairs` in place of the whole parameters.

        Args:
            applied: 0-d bool, false if the engine skipped the step for a non-finite gradient. On a GPU, `if applied:` makes the host wait
                for the device in every step; `core.ema` and `torch.where` use it without waiting.
        """
        for name, follow in self.follows.items():
            if (average := getattr(self, name)) is not None:
                decay = getattr(self, follow.decay)(progress)
                update_ema(average, getattr(self, follow.source), decay, applied, follow.buffers)


class CoupledObjective(Objective):
    """An objective whose loss needs the embeddings of the whole global batch (contrastive ones)."""

    @abstractmethod
    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """Embeddings of these samples, one row each per tensor."""

    @abstractmethod
    def loss(self, embeddings: tuple[Tensor, ...], own: Sequence[Tensor], progress: Progress) -> Loss:
        """The loss of this rank's embeddings within the global batch; `own`: the values of `loss_parameters`."""

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        return self.loss(self.embed(batch), self.loss_parameters(), progress)


class Embeddings(NamedTuple):
    """What an engine's forward of a coupled objective gives to its loss: `features` per sample, and `loss_params`, the loss's parameters.

    An engine may keep a parameter in pieces, so its value comes out of the forward, with its graph.
    """

    features: tuple[Tensor, ...]
    loss_params: tuple[Tensor, ...]


class DeviceContext(Protocol):
    """A rank's device as the trainer sees it: copies to it, kernels, threads, random state and measured time."""

    device: torch.device
    kernel: str

    @property
    def precision(self) -> str: ...
    @property
    def clock(self) -> StepClock: ...

    def to_device(self, batch: Batch) -> Batch: ...
    def prefetch_to_device(self, batch: Batch) -> Batch: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def limit_threads(self) -> None: ...
    def choose_threads(self, trained_with: int | None = None) -> str: ...
    def restore_kernel(self, name: str) -> str | None: ...
    def random_state(self) -> dict[str, Tensor]: ...
    def set_random_state(self, state: Mapping[str, Tensor]) -> None: ...


class StepClock(Protocol):
    """Seconds that forwards took since the last call."""

    def take(self) -> float: ...


class Engine(Protocol):
    """Runs an objective on devices: precision, wrapping, backward, optimizer.

    `device_context`: precision, kernels, random state and time on this rank's device.
    `full_model`: inside, rank 0 has the objective as an ordinary module to evaluate, every rank where `replicated`; all ranks
    enter it together.
    `pieces`: what this rank writes of the parts `model` and `optimizer`. `load`: takes its own share of them.
    """

    @property
    def device_context(self) -> DeviceContext: ...

    replicated: bool

    @property
    def device(self) -> torch.device: ...

    def prepare(self, objective: Objective) -> None: ...
    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss: ...
    def embed(self, batch: Batch, *, last: bool) -> Embeddings: ...
    def backward(self, total: Tensor, *, last: bool) -> None: ...
    def step(self, progress: Progress) -> StepReport: ...
    def full_model(self) -> AbstractContextManager[Objective | None]: ...
    def pieces(self) -> Pieces: ...
    def load(self, source: CheckpointReader) -> None: ...


class Cursor(NamedTuple):
    """Samples taken from each of the plan's streams up to and including a batch; valid for any world size."""

    positions: tuple[int, ...]

    @staticmethod
    def joined(parts: Sequence[Cursor]) -> Cursor:
        """The whole cursor from those of the ranks, in their order."""
        return Cursor(tuple(position for part in parts for position in part.positions))

    def to_json(self) -> list[int]:
        return list(self.positions)


class LoaderBatch(NamedTuple):
    """One batch, where the plan stands after it, and what had to be skipped to fill it: (shard, reason) -> count, and one key of each."""

    batch: dict[str, Tensor]
    cursor: Cursor
    skipped: dict[tuple[str, str], int]
    first_keys: Mapping[tuple[str, str], str] = MappingProxyType({})


class DataPipeline(Protocol):
    """Batches in a fixed order; `start` continues from a cursor. `fingerprint` names the data set and the plan."""

    fingerprint: dict[str, Any]

    def start(self, cursor: Cursor | None) -> Generator[LoaderBatch, None, None]: ...
    def preview(self, batch: Batch, count: int) -> Sequence[Sample]: ...
