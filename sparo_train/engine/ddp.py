"""DistributedDataParallel: a copy of the model per rank, gradients averaged while backward runs."""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.contracts import Batch, CoupledObjective, Loss, Objective, Progress
from ..core.distributed import Ranks
from ..core.errors import ConfigError
from .local import DeviceConfig, LocalEngine
from .optim import OptimConfig

# Our buffers never change; torch 2.15 renamed the switch for not sending them before every forward.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DdpEngineConfig(DeviceConfig):
    """As `local`, on every rank. `timeout`: seconds after which a rank that does not answer ends the run."""

    kind: Literal["ddp"]
    timeout: float = Field(default=600.0, gt=0)
    bucket_mb: int = Field(default=25, gt=0)


class _Root(nn.Module):
    """What DDP wraps: all that is run with a graph goes through one forward, so that its hooks see it."""

    def __init__(self, objective: Objective):
        super().__init__()
        self.objective = objective

    def forward(self, batch: Batch, progress: Progress | None) -> Any:
        if progress is not None:
            return self.objective(batch, progress)
        assert isinstance(self.objective, CoupledObjective)
        return self.objective.embed(batch)


class DdpEngine(LocalEngine):
    """Order of preparation: activation checkpointing, device, compile, DDP, optimizer.

    Compiled blocks see their checkpointing; DDP comes after both, because its hooks belong to the parameters; the
    optimizer comes last, on the parameters as they will stay.

    Raises:
        ConfigError: more ranks on this machine than GPUs.
    """

    def __init__(self, config: DdpEngineConfig, optim: OptimConfig, ranks: Ranks):
        super().__init__(config, optim)
        self.ranks, self.bucket_mb = ranks, config.bucket_mb
        if self.device.type == "cuda":
            local = ranks.world.local_rank
            if torch.cuda.device_count() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
                local = 0  # srun gave each task a GPU of its own
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"engine.kind=ddp: rank {ranks.rank} is number {local} on this machine, which has "
                    f"{torch.cuda.device_count()} GPU(s); start one process per GPU"
                )
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)

    def wrap(self, objective: Objective) -> None:
        root = _Root(objective)
        self._warm = self.ranks.size == 1
        if self._warm:
            self._root: nn.Module = root
            return
        on_gpu = [self.device] if self.device.type == "cuda" else None
        with self.ranks.named("comparing the models of the ranks"):
            self._root = DistributedDataParallel(
                root,
                device_ids=on_gpu,
                gradient_as_bucket_view=True,
                bucket_cap_mb=self.bucket_mb,
                **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
            )

    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss:
        """The objective's loss of this rank's batch; the mean over ranks is the global one."""
        if isinstance(self.objective, CoupledObjective):  # its loss talks to other ranks, outside what is timed
            return self.objective.loss(self.embed(batch, last=last), progress)
        return self._run(batch, progress, last)

    def embed(self, batch: Batch, *, last: bool) -> tuple[Tensor, ...]:
        """A coupled objective's embeddings of this rank's batch."""
        return self._run(batch, None, last)

    def _run(self, batch: Batch, progress: Progress | None, last: bool) -> Any:
        moved = self._moved(batch)
        if not self._warm and torch.is_grad_enabled():
            self._warm_up(moved, progress)
        with self._exchanging(last), self._autocast(), self._attention(), self._clock.running():
            return self._root(moved, progress)

    def _warm_up(self, batch: Batch, progress: Progress | None) -> None:
        """Before anything is accumulated: one backward of zeros, after which DDP orders its buckets anew, once and for all.

        Otherwise the first step of every process would add up in another order than its later ones, and a resumed run
        would differ in the last bit from one never stopped.
        """
        self._warm = True
        state = self.random_state()
        with self._autocast(), self._attention():
            out = self._root(batch, progress)
        nothing = [p.sum() for p in self.objective.parameters() if p.requires_grad]
        nothing += [t.sum() for t in (out if isinstance(out, tuple) else (out.total,))]
        super().backward(torch.stack([t.float() for t in nothing]).sum() * 0.0, last=True)
        self.optimizer.zero_grad(set_to_none=True)
        self.set_random_state(state)

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the `last` micro-batch they are the mean over ranks."""
        with self._exchanging(last), self.ranks.named("averaging gradients"):
            super().backward(total, last=last)

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        wrapped = isinstance(self._root, DistributedDataParallel)
        return self._root.no_sync() if wrapped and not last else nullcontext()  # type: ignore[union-attr,operator]
