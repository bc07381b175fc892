"""FSDP2: parameters, gradients and optimizer state in rows over the ranks, gathered unit by unit while they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..core.contracts import CoupledObjective, Objective
from ..core.errors import ConfigError
from .ranked import RankedEngineConfig, Root, ShardedEngine
from .spans import Span

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # None: as the parameters are


class Fsdp2EngineConfig(RankedEngineConfig):
    """As `ddp`, with everything in pieces.

    `reshard_after_forward`: free a block's gathered parameters between its forward and its backward (less memory, one
    more gather); false keeps them. `shard_size`: ranks that share one copy (default: all; a machine's GPUs: HSDP).
    `param_dtype`: what is gathered and computed with; default: that of `precision`. `cpu_offload`: shards and optimizer in host memory.
    """

    kind: Literal["fsdp2"]
    reshard_after_forward: bool = True
    shard_size: int | None = Field(default=None, gt=0)
    param_dtype: Literal["fp32", "bf16"] | None = None
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    cpu_offload: bool = False


class Fsdp2Engine(ShardedEngine):
    """Order of preparation: activation checkpointing, device, compile, `fully_shard` of each unit, then of the root, optimizer.

    Units are sharded after they are compiled, so that their hooks stay outside of the graph; the optimizer comes last,
    on the shards. 0-d parameters cannot be sharded: they and what the loss uses itself stay whole, averaged by us.
    """

    kind = "fsdp2"
    config: Fsdp2EngineConfig

    def wrap(self, objective: Objective) -> None:
        config, size = self.config, self.ranks.size
        self._root = Root(objective)
        self._kept: list[torch.nn.Parameter] = []
        if size == 1:
            if config.cpu_offload:
                raise ConfigError(
                    "engine.cpu_offload: shards over ranks go to the host, and there is one rank; start more"
                )
            return
        shard = config.shard_size or size
        if size % shard:
            raise ConfigError(f"engine.shard_size={shard}: does not divide {size} ranks")
        own = list(objective.loss_parameters()) if isinstance(objective, CoupledObjective) else []
        kept = {p for p in objective.parameters() if p.ndim == 0} | set(own)
        self._kept = [p for p in objective.parameters() if p in kept]  # in the same order on every rank
        shape, names = ((size,), ("shard",)) if shard == size else ((size // shard, shard), ("replicate", "shard"))
        with self.ranks.named("sharding the model"):
            common: dict[str, Any] = {
                "mesh": init_device_mesh(self.device.type, shape, mesh_dim_names=names),
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=_DTYPES[config.param_dtype or config.precision],
                    reduce_dtype=torch.bfloat16 if config.reduce_dtype == "bf16" else self._plain_dtype(),
                ),
                "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
                if config.cpu_offload
                else OffloadPolicy(),
                "reshard_after_forward": config.reshard_after_forward,
                "ignored_params": kept,
            }
            for unit in objective.shard_units():
                fully_shard(unit, **common)
            fully_shard(self._root, **{**common, "reshard_after_forward": False})  # backward needs it first

    def _plain_dtype(self) -> torch.dtype | None:
        return None if (self.config.param_dtype or self.config.precision) == "fp32" else torch.float32

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the `last` micro-batch they are the mean over ranks, each rank holding its rows."""
        if isinstance(self._root, FSDPModule):
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
        super().backward(total, last=last)
        if last and self.ranks.size > 1:
            with self.ranks.named("averaging gradients"):
                for p in self._kept:
                    if p.grad is not None:
                        dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                        p.grad.div_(self.ranks.size)

    def norms(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient's norm, whole and within each of the objective's parts: squares of this rank's rows, summed over ranks."""
        squares: dict[int, Tensor] = {}
        for key, gradient in self._gradients().items():
            span = Span.of(gradient)
            mine = span.copy == 0 if isinstance(gradient, DTensor) else self.ranks.rank == 0
            squares[key] = torch.linalg.vector_norm(span.local, dtype=torch.float32).square() * float(mine)
        parts = {name: {id(p) for p in module.parameters()} for name, module in self.objective.parts().items()}
        sums = [
            sum((s for key, s in squares.items() if key in ids), torch.zeros(()))
            for ids in (squares.keys(), *parts.values())
        ]
        found = torch.stack([s.to(self.device) for s in sums])
        if self.ranks.size > 1:
            with self.ranks.named("summing the gradient's norm"):
                dist.all_reduce(found)
        whole, *norms = found.sqrt().cpu() if self.config.cpu_offload else found.sqrt()
        return whole, dict(zip(parts, norms, strict=True))

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.objective.state_dict().items():
            if isinstance(tensor, DTensor):
                tensor = tensor.to(self.device).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            yield name, tensor
