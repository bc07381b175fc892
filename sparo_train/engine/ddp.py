"""DistributedDataParallel: one copy of the model per rank, with gradients averaged during backward."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ..core.config import resumable_field
from ..core.contracts import Batch, Objective, Progress
from ..core.errors import ConfigError
from .engine_kind import EngineKind, replicated_costs
from .ranked import RankedEngine, RankedEngineConfig, Root

# Buffers are equal on all ranks, or belong to one rank until they are summed, so they need not be broadcast before each
# forward. torch 2.15 renamed this option.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DdpEngineConfig(RankedEngineConfig):
    """Like `local`, on every rank."""

    kind: Literal["ddp"] = resumable_field("ddp", "Kind of the engine: an entry of sparo.engines.")
    bucket_mb: int = resumable_field(25, "Gradient bucket size in MB.", gt=0)


class DdpEngine(RankedEngine):
    """Engine with DistributedDataParallel.

    Order of preparation: activation checkpointing, device, compile, DDP, optimizer. Compiled blocks see their
    checkpointing. DDP follows both, because its hooks belong to the parameters. The optimizer is last, because it holds
    the final parameters.
    """

    kind = "ddp"
    config: DdpEngineConfig

    def wrap(self, objective: Objective) -> None:
        root = Root(objective)
        # A single rank has no gradients to exchange and no order to settle.
        self._warm = self.ranks.size == 1
        if self._warm:
            self._root = root
            return
        on_gpu = [self.device] if self.device.type != "cpu" else None
        with self.ranks.error_context("comparing the models of the ranks"):
            self._root = DistributedDataParallel(
                root,
                device_ids=on_gpu,
                # Gradients are views of the buckets, which avoids copies before and after the exchange.
                gradient_as_bucket_view=True,
                bucket_cap_mb=self.config.bucket_mb,
                **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
            )

    def _run(self, batch: Batch, progress: Progress | None, last: bool) -> Any:
        if not self._warm and torch.is_grad_enabled():
            self._warm_up(batch, progress)
        return super()._run(batch, progress, last)

    def _warm_up(self, batch: Batch, progress: Progress | None) -> None:
        """Run one backward with zero gradients before the first step, after which DDP fixes the order of its buckets.

        Otherwise the first step of every process would sum in another order than later steps, and a resumed run would
        differ in the last bit from an uninterrupted one.
        """
        self._warm = True
        state, buffers = self.device_context.random_state(), list(self.objective.buffers())
        before = [b.clone() for b in buffers]  # a forward may update buffers
        out = super()._run(batch, progress, last=True)
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        # Check on the first graph, because DDP itself would wait forever.
        self._refuse_unused_parameters(outputs)
        # Times zero, because only the order of hooks matters.
        self.backward(torch.stack([t.float().sum() for t in outputs]).sum() * 0.0, last=True)
        self.optimizer.zero_grad(set_to_none=True)
        self.device_context.set_random_state(state)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def _refuse_unused_parameters(self, outputs: list[Tensor]) -> None:
        """Raise `ConfigError` for parameters that do not contribute to these outputs: DDP would wait for their gradients forever."""
        leaves, ahead = {id(t) for t in outputs}, {t.grad_fn for t in outputs}
        visited = set(ahead)
        while ahead:
            node = ahead.pop()
            leaves.add(id(getattr(node, "variable", None)))  # nodes that accumulate gradients
            following = {further for further, _ in getattr(node, "next_functions", ()) if further not in visited}
            visited |= following
            ahead |= following
        lost = [name for name, p in self.objective.named_parameters() if p.requires_grad and id(p) not in leaves]
        if lost:
            raise ConfigError(
                f"engine.kind=ddp: the loss does not depend on {', '.join(lost[:4])}{' …' if lost[4:] else ''}. "
                "Freeze these parameters, or use engine.kind=fsdp2."
            )

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        # A single rank has no exchange to suppress.
        wrapped = isinstance(self._root, DistributedDataParallel)
        return self._root.no_sync() if wrapped and not last else nullcontext()


ENGINE = EngineKind(DdpEngineConfig, DdpEngine, replicated_costs)
