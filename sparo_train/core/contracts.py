"""Contracts between the parts: objectives, engines and data pipelines. The training loop depends on nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .disk.metrics import Sample
from .disk.pieces import CheckpointReader, Pieces
from .ema import Follow, update_ema
from .errors import ConfigError

Batch = Mapping[str, Tensor]
APPLIED = torch.tensor(True)  # for `Objective.after_step` if the host already knows that the step was applied


@dataclass(frozen=True)
class Progress:
    """Position in training.

    `step` counts the optimizer steps taken. `steps_before` counts those of the run that this one branched from;
    schedules ignore them.
    """

    step: int
    total_steps: int
    samples: int
    steps_per_epoch: int = 1
    steps_before: int = 0

    @property
    def epoch(self) -> int:
        """Return the number of complete epochs after this step."""
        return self.step // self.steps_per_epoch


class Loss(NamedTuple):
    """Loss of one batch: `total`, a 0-d tensor to back-propagate, logged as `loss`, and `metrics`, detached 0-d tensors to log by name."""

    total: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class StepReport:
    """Result of one optimizer step.

    Attributes:
        applied: False if the engine skipped the step because of a non-finite gradient; a 0-d bool tensor if the host
            did not wait for it.
        grad_norm: gradient norm, a 0-d tensor on the device.
        norms: gradient norms of the parts of the objective, likewise.
        without_gradient: names of trainable parameters without a gradient in this step; filled in a process's first
            step only.
    """

    lr: float
    grad_norm: Tensor
    applied: bool | Tensor
    norms: dict[str, Tensor]
    without_gradient: tuple[str, ...] = ()


class Footprint(NamedTuple):
    """Size of one sample for estimates of memory and computation.

    Attributes:
        tokens: tokens by kind of input.
        towers: (tokens * width, blocks) of everything that keeps activations for backward.
        encoding: number of values in one encoding.
        loss: bytes that the loss needs for this rank's batch within the global batch.
        written: number of values per sample that layers other than Transformer blocks write and keep.
    """

    tokens: dict[str, int]
    towers: list[tuple[int, int]]
    encoding: int
    loss: int
    written: int = 0


@dataclass(frozen=True)
class ParamGroups:
    """Parameters that the optimizer treats differently, by their names in the objective.

    Attributes:
        no_decay: parameters without weight decay.
        adamw_only: matrices that are not linear maps (queries, embeddings), which `optim.kind: muon` leaves to AdamW.
        unclipped: parameters exempt from `optim.clip_per: tensor`.
        layer_ids: number of layers above a parameter in its tower, for `optim.layer_decay`; empty if the method does
            not support it.
        norm_groups: modules whose gradient norms are logged separately, by log name.
    """

    no_decay: Collection[str] = ()
    adamw_only: Collection[str] = ()
    unclipped: Collection[str] = ()
    layer_ids: Mapping[str, int] = field(default_factory=dict)
    norm_groups: Mapping[str, nn.Module] = field(default_factory=dict)


class FileWeights(NamedTuple):
    """Weights of a file under an objective's names, and the normalization of pixels that they were trained with."""

    weights: Mapping[str, Tensor]
    mean: Sequence[float]
    std: Sequence[float]


class Objective(nn.Module, ABC):
    """Training method: its modules, its loss, and updates after a step. It does not depend on ranks or engines.

    Only `forward` is required. Three declarations cover most methods: `follows` (averages of weights), `param_groups`
    (parameters that the optimizer treats differently) and `shard_units` (modules that engines compile and shard).
    """

    # Averages by module name, updated after every applied step. Names whose module is None are ignored.
    follows: ClassVar[Mapping[str, Follow]] = {}
    # True if inputs need more than 16 bits (positions, poses), so engines with 16-bit weights do not cast them.
    exact_inputs: ClassVar[bool] = False
    # True if `engine.compile: auto` compiles it: only methods whose steps were measured on a GPU.
    compile_by_default: ClassVar[bool] = False
    # Patterns of parameters and buffers that no encoder has (such as a head); `start_from` leaves them as initialized.
    not_in_encoders: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Return the loss of this rank's batch; its mean over ranks is the global loss. May update buffers."""

    def shard_units(self) -> Sequence[nn.Module]:
        """Return the modules that an engine shards one by one, in forward order."""
        return []

    def compile_units(self) -> Sequence[nn.Module]:
        """Return the modules that an engine compiles one by one. Default: those of `shard_units`."""
        return self.shard_units()

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Rename the weights of an encoder's module, which `start_from` loads, to their names here. Default: unchanged."""
        return dict(weights)

    def weights_of_file(self, content: Any, key: str | None) -> FileWeights | None:
        """Return the weights in another program's file, or in its part `key` (`FILE?state=KEY`); None if it cannot read it. Default: None."""
        return None

    def adapt_to_resolution(self, weights: Mapping[str, Tensor], theirs: Any = None) -> Mapping[str, Tensor]:
        """Adapt the weights of a run of this method, whose block is `theirs`, to this image size. Default: unchanged."""
        return weights

    def refuse_length(self, total_steps: int) -> None:
        """Raise `ConfigError` if a run of this length ends before part of a schedule begins."""

    def on_weights_loaded(self) -> None:
        """React to weights that were loaded from elsewhere; called once, before training."""

    def preprocess_batch(self, batch: Batch, progress: Progress) -> Batch:
        """Return the part of a batch that this step uses (such as smaller images early in training). Default: the batch unchanged."""
        return batch

    def param_groups(self) -> ParamGroups:
        """Return the parameters that the optimizer treats differently.

        Default: no weight decay for parameters with fewer than two dimensions, and AdamW for parameters that modules
        list in `adamw_only_parameters`.
        """
        adamw_only = {
            f"{place}.{name}"
            for place, module in self.named_modules()
            for name in getattr(module, "adamw_only_parameters", ())
        }
        return ParamGroups({name for name, p in self.named_parameters() if p.ndim < 2}, adamw_only)

    def set_grad_checkpointing(self, enable: bool) -> None:
        """Recompute activations in backward, if the objective's modules support it."""
        name = type(self).__name__
        raise ConfigError(f"engine.grad_checkpointing: {name} has no blocks to checkpoint. Set it to false.")

    def loss_parameters(self) -> Sequence[nn.Parameter]:
        """Return parameters that the loss itself uses, outside of `embed` (temperature, bias)."""
        return []

    def frozen_this_step(self, progress: Progress) -> Sequence[nn.Parameter]:
        """Return the parameters that this step must not change, not even by weight decay."""
        return []

    def log_metrics(self) -> Mapping[str, float | Tensor]:
        """Return metrics of the last batch that are too slow for every step; called at log steps only. Default: none."""
        return {}

    def check_health(self, facts: Mapping[str, float]) -> str | None:
        """Return a message if these averaged metrics show a problem, otherwise None. Raise `CollapseError` to end the run."""
        return None

    def footprint(self, batch: int, world_batch: int) -> Footprint | None:
        """Return the `Footprint` of a sample for a rank's batch of `batch` within `world_batch`, or None if unknown."""
        return None

    def ema_pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Return pairs of each parameter of an average in `follows` and the parameter it follows, element by element."""
        for name, follow in self.follows.items():
            if (average := getattr(self, name)) is not None:
                yield from zip(average.parameters(), self.get_submodule(follow.source).parameters(), strict=True)

    def after_step(self, progress: Progress, applied: Tensor) -> None:
        """Update the averages in `follows`; called after every optimizer step. Overrides (for a center or a clamp) call `super()`.

        Engines with sharded weights may call it with shards of `loss_parameters` and `ema_pairs` in place of the whole
        parameters.

        Args:
            progress: position in training.
            applied: 0-d bool, False if the engine skipped the step because of a non-finite gradient. On a GPU, `if
                applied:` makes the host wait for the device in every step; `core.ema` and `torch.where` use it without
                waiting.
        """
        for name, follow in self.follows.items():
            average = getattr(self, name)
            if average is not None and (decay := getattr(self, follow.decay)(progress)) is not None:
                update_ema(average, self.get_submodule(follow.source), decay, applied, follow.buffers)


class CoupledObjective(Objective):
    """Objective whose loss needs the embeddings of the whole global batch (contrastive losses)."""

    @abstractmethod
    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return embeddings of these samples, with one row per sample in each tensor."""

    @abstractmethod
    def loss(self, embeddings: tuple[Tensor, ...], own: Sequence[Tensor], progress: Progress) -> Loss:
        """Return the loss of this rank's embeddings within the global batch; `own` are the values of `loss_parameters`."""

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        return self.loss(self.embed(batch), self.loss_parameters(), progress)


class Embeddings(NamedTuple):
    """Output of an engine's forward of a coupled objective: `features` per sample, and `loss_params`, the parameters of the loss.

    An engine may shard a parameter, so its value is returned by the forward, with its graph.
    """

    features: tuple[Tensor, ...]
    loss_params: tuple[Tensor, ...]


class DeviceContext(Protocol):
    """Device of this rank as the trainer uses it: copies, kernels, threads, random state and timing."""

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
    """Return the seconds that forwards took since the last call."""

    def take(self) -> float: ...


class Engine(Protocol):
    """Engine that runs an objective on devices: precision, wrapping, backward, optimizer.

    Attributes:
        device_context: precision, kernels, random state and timing on this rank's device.
        full_model: context in which every rank has the objective as an ordinary module for evaluation. All ranks
            enter it together.
        pieces: returns this rank's pieces of the parts `model` and `optimizer`.
        load: loads this rank's share of them.
    """

    @property
    def device_context(self) -> DeviceContext: ...

    @property
    def device(self) -> torch.device: ...

    def prepare(self, objective: Objective) -> None: ...
    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss: ...
    def embed(self, batch: Batch, *, last: bool) -> Embeddings: ...
    def backward(self, total: Tensor, *, last: bool) -> None: ...
    def step(self, progress: Progress) -> StepReport: ...
    def full_model(self) -> AbstractContextManager[Objective]: ...
    def pieces(self) -> Pieces: ...
    def load(self, source: CheckpointReader) -> None: ...


class Cursor(NamedTuple):
    """Next position in the plan of each row of a batch; all rows of a stream together have `rows_per_stream`. Valid for any world size."""

    positions: tuple[int, ...]
    rows_per_stream: int = 1

    @staticmethod
    def join(parts: Sequence[Cursor]) -> Cursor:
        """Join the cursors of all ranks, in rank order."""
        rows = max((part.rows_per_stream for part in parts), default=1)
        return Cursor(tuple(position for part in parts for position in part.positions), rows)

    def to_json(self) -> list[int]:
        """Return one position per stream, or, after skipped samples, the positions of all rows."""
        n, rows = self.rows_per_stream, self.positions
        return list(rows[::n] if all(p == rows[i - i % n] + i % n for i, p in enumerate(rows)) else rows)


class LoaderBatch(NamedTuple):
    """One batch, the cursor after it, and the number of samples skipped to fill it: (shard, reason) -> count, with one key each."""

    batch: dict[str, Tensor]
    cursor: Cursor
    skipped: dict[tuple[str, str], int]
    first_keys: Mapping[tuple[str, str], str] = MappingProxyType({})


class BatchStream(Protocol):
    """Batches in order; `close` ends the workers that prepare them."""

    def __next__(self) -> LoaderBatch: ...
    def close(self) -> None: ...


class DataPipeline(Protocol):
    """Source of batches in a fixed order. `start` continues from a cursor. `fingerprint` identifies the data set and the plan."""

    fingerprint: dict[str, Any]

    def start(self, cursor: Cursor | None, device: torch.device) -> BatchStream: ...
    def preview(self, batch: Batch, count: int) -> Sequence[Sample]: ...
