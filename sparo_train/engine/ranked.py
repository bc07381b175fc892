"""Common parts of engines with several ranks: one device each, and one module through which all forwards go."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.config import resumable_field
from ..core.contracts import Batch, CoupledObjective, Embeddings, Loss, Objective, Progress
from ..core.distributed import Ranks
from ..core.errors import ConfigError
from .device_context import Device, DeviceConfig
from .local import LocalEngine
from .numa import bind_to_socket
from .optim import OptimConfig

logger = logging.getLogger(__name__)


class RankedEngineConfig(DeviceConfig):
    """One process per device."""

    timeout: float = resumable_field(600.0, "End the run if a rank does not respond for this many seconds.", gt=0)
    join_timeout: float = resumable_field(
        300.0,
        "Seconds to wait at the start until all ranks have joined. After that, the run ends with an error "
        "that names the missing ranks.",
        gt=0,
    )
    bind_cores: bool = resumable_field(
        True,
        "Bind each rank and its loader workers to the CPU socket of its GPU, if each socket of the machine has a rank.",
    )
    flight_recorder: int = resumable_field(
        2000,
        "Number of most recent collectives that each rank records. If a collective exceeds `timeout`, the records are written to "
        "RUN/flight_recorder, for torch's tool `torchfrtrace`. 0: none.",
        ge=0,
    )


class Root(nn.Module):
    """Wrapped module: everything with a graph runs through its forward, so that the wrapper's hooks see it."""

    def __init__(self, objective: Objective):
        super().__init__()
        self.objective = objective

    def forward(self, batch: Batch, progress: Progress | None) -> Any:
        if progress is not None:
            return self.objective(batch, progress)
        assert isinstance(self.objective, CoupledObjective)
        # Return them through this forward, too, or DDP would not know that they are used.
        own = tuple(p.clone() for p in self.objective.loss_parameters())  # hooks belong on outputs, not on leaves
        return tuple(self.objective.embed(batch)), own


class RankedEngine(LocalEngine):
    """Engine that runs the objective through `Root`, which a subclass wraps. Raises `ConfigError` if there are more ranks than GPUs."""

    kind: str
    _root: Any  # `Root` after wrapping

    def __init__(self, config: RankedEngineConfig, optim: OptimConfig, ranks: Ranks):
        super().__init__(config, optim)
        self.ranks, self.share, self._ranked_config = ranks, (ranks.rank, ranks.size), config
        assign_gpu(self.device_context, self.kind, ranks)

    def prepare(self, objective: Objective) -> None:
        connect_device(self.device_context, self._ranked_config, self.ranks)
        super().prepare(objective)

    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss:
        """Return the objective's loss of this rank's batch; the mean over ranks is the global loss."""
        if isinstance(
            self.objective, CoupledObjective
        ):  # this loss communicates with other ranks, outside the timed part
            return self.objective.loss(*self.embed(batch, last=last), progress)
        return self._run(batch, progress, last)

    def embed(self, batch: Batch, *, last: bool) -> Embeddings:
        """Return a coupled objective's embeddings of this rank's batch."""
        return Embeddings(*self._run(batch, None, last))

    def _run(self, batch: Batch, progress: Progress | None, last: bool) -> Any:
        device_batch = self.device_context.to_device(batch)
        with (
            self._gradient_sync(last),
            self.device_context.autocast(),
            self.device_context.attention(),
            self.device_context.clock.running(),
        ):
            return self._root(device_batch, progress)

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the `last` micro-batch, they are the mean over ranks."""
        with self._gradient_sync(last), self.ranks.error_context("averaging gradients"):
            super().backward(total, last=last)

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward, in which only the last micro-batch exchanges gradients."""
        return nullcontext()


def assign_gpu(device_context: Device, kind: str, ranks: Ranks) -> None:
    """Assign the GPU with this rank's local number to it. Raises `ConfigError` if there are more ranks than GPUs."""
    device_type = device_context.device.type
    if device_type == "cpu":
        return
    local = ranks.world.local_rank
    count = torch.accelerator.device_count()
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local = 0  # srun gave each task its own GPU
    if local >= count:
        raise ConfigError(
            f"engine.kind={kind}: rank {ranks.rank} needs GPU {local} (counted from 0), but this machine has "
            f"{count} GPU(s). Start one process per GPU."
        )
    device_context.device = torch.device(device_type, local)


def connect_device(device_context: Device, config: RankedEngineConfig, ranks: Ranks) -> None:
    """Start this rank's device and its connections to those of the other ranks, and bind the process to cores near it.

    NCCL would otherwise connect in the first step, where a failure is hard to understand. Not earlier, because loader
    workers are forked before: they must not inherit a context of the device.
    """
    device = device_context.device
    if device.type == "cpu":
        return
    torch.accelerator.set_device_index(device)
    if ranks.size == 1:
        return
    if config.flight_recorder and "TORCH_FR_DUMP_TEMP_FILE" in os.environ:
        with suppress(OSError):  # torch does not create the folder; a run must not fail because of it
            Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"]).parent.mkdir(parents=True, exist_ok=True)
    with ranks.error_context("connecting the devices of the ranks", only_collectives=True):
        ready = torch.zeros((), device=device)
        dist.all_reduce(ready)
        float(ready)  # waits, so that an error of the exchange is raised here
    if config.bind_cores and (line := bind_to_socket(device, ranks)):
        logger.info(line)


def record_collectives(size: int, folder: Path) -> None:
    """Let NCCL write its last collectives to `RUN/flight_recorder` if one runs into the timeout. Call it before joining.

    Variables that the user has set are kept.

    Args:
        size: number of collectives.
        folder: the run folder.
    """
    out = folder / "flight_recorder"
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", str(size)),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", str(size)),  # an older name
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", str(int(size > 0))),
        ("TORCH_FR_DUMP_TEMP_FILE", str(out / "rank-")),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(out / "rank-")),
    ):
        os.environ.setdefault(name, value)


class PlainCopy:
    """The objective as an ordinary module on every rank, for evaluation with engines that shard parameters.

    Created before anything is wrapped. Its weights take no memory until they are gathered for an evaluation.
    """

    def __init__(self, objective: Objective, ranks: Ranks, device: torch.device):
        self.ranks, self.device = ranks, device
        # deepcopy uses these tensors instead of copying weights.
        empty = {id(t): _without_memory(t) for t in objective.state_dict(keep_vars=True).values()}
        self._plain = copy.deepcopy(objective, empty)
        self._empty = self._plain.state_dict(keep_vars=True)

    @contextmanager
    def fill(self, gathered: Callable[[], Iterator[tuple[str, Tensor]]]) -> Iterator[Objective]:
        """Return the objective with its present weights in evaluation mode.

        Args:
            gathered: the objective's state, one whole tensor at a time; all ranks iterate together.
        """
        with self.ranks.error_context("gathering the model"), torch.no_grad():
            self._plain.load_state_dict(dict(gathered()), assign=True)
        try:
            # In evaluation mode only inside this context.
            yield self._plain.to(self.device).eval()
        finally:
            self._plain.load_state_dict(self._empty, assign=True)


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
