"""What the engines of several ranks have in common: a device each, and one module that all forwards go through."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from ..core.contracts import Batch, CoupledObjective, Embedded, Loss, Objective, Progress
from ..core.distributed import Ranks
from ..core.errors import ConfigError
from .local import DeviceConfig, LocalEngine
from .optim import OptimConfig


class RankedEngineConfig(DeviceConfig):
    """`timeout`: seconds after which a rank that does not answer ends the run."""

    timeout: float = Field(default=600.0, gt=0)


class Root(nn.Module):
    """What is wrapped: all that is run with a graph goes through one forward, so that the wrapper's hooks see it."""

    def __init__(self, objective: Objective):
        super().__init__()
        self.objective = objective

    def forward(self, batch: Batch, progress: Progress | None) -> Any:
        if progress is not None:
            return self.objective(batch, progress)
        assert isinstance(self.objective, CoupledObjective)
        own = tuple(p.clone() for p in self.objective.loss_parameters())  # hooks belong on outputs, not on leaves
        return tuple(self.objective.embed(batch)), own


class RankedEngine(LocalEngine):
    """Runs the objective through `Root`, wrapped by a subclass.

    Raises:
        ConfigError: more ranks on this machine than GPUs.
    """

    kind: str
    _root: Any  # what `Root` was wrapped into

    def __init__(self, config: RankedEngineConfig, optim: OptimConfig, ranks: Ranks):
        super().__init__(config, optim)
        self.ranks, self.share = ranks, (ranks.rank, ranks.size)
        if self.device.type == "cuda":
            local = ranks.world.local_rank
            if torch.cuda.device_count() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
                local = 0  # srun gave each task a GPU of its own
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"engine.kind={self.kind}: rank {ranks.rank} is number {local} on this machine, which has "
                    f"{torch.cuda.device_count()} GPU(s); start one process per GPU"
                )
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)

    def forward(self, batch: Batch, progress: Progress, *, last: bool) -> Loss:
        """The objective's loss of this rank's batch; the mean over ranks is the global one."""
        if isinstance(self.objective, CoupledObjective):  # its loss talks to other ranks, outside what is timed
            return self.objective.loss(*self.embed(batch, last=last), progress)
        return self._run(batch, progress, last)

    def embed(self, batch: Batch, *, last: bool) -> Embedded:
        """A coupled objective's embeddings of this rank's batch."""
        return Embedded(*self._run(batch, None, last))

    def _run(self, batch: Batch, progress: Progress | None, last: bool) -> Any:
        moved = self._moved(batch)
        with self._exchanging(last), self._autocast(), self._attention(), self._clock.running():
            return self._root(moved, progress)

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the `last` micro-batch they are the mean over ranks."""
        with self._exchanging(last), self.ranks.named("averaging gradients"):
            super().backward(total, last=last)

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        """Around forwards and backwards: only those of the last micro-batch exchange gradients."""
        return nullcontext()


class ShardedEngine(RankedEngine):
    """Keeps parameters in pieces; what needs them whole gets a copy."""

    def prepare(self, objective: Objective) -> None:
        # Made before anything is wrapped, on the host: it costs no device memory until it is used.
        self._plain = copy.deepcopy(objective) if self.ranks.rank == 0 else None
        super().prepare(objective)

    @abstractmethod
    def _squares(self) -> Iterator[tuple[int, Tensor]]:
        """This rank's share of the squared norm of each gradient, by the id of its parameter."""

    def _norms(self) -> dict[int, Tensor]:
        """The norm of each gradient: squares summed over ranks."""
        squares = {key: square.to(self.device) for key, square in self._squares()}
        trained = [id(p) for p in self.objective.parameters() if p.requires_grad]  # in the same order on every rank
        nothing = torch.zeros((), device=self.device)
        sums = torch.stack([squares.get(key, nothing) for key in trained])
        if self.ranks.size > 1:
            with self.ranks.named("summing the gradient's norm"):
                dist.all_reduce(sums)
        return dict(zip(trained, sums.sqrt(), strict=True))

    @abstractmethod
    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """The state of the objective, whole, one tensor at a time; all ranks together."""

    @contextmanager
    def whole(self) -> Iterator[Objective | None]:
        """On rank 0 a copy of the objective as it stands, in evaluation mode; None on the others."""
        with self.ranks.named("gathering the model"), torch.no_grad():
            state = {name: t.to("cpu", copy=True) for name, t in self._gathered() if self._plain is not None}
        if self._plain is None:
            yield None
            return
        self._plain.load_state_dict(state, assign=False)
        try:
            yield self._plain.to(self.device).eval()
        finally:
            self._plain.to("cpu")
