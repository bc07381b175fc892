"""FSDP2: parameters, gradients and optimizer state sharded by rows, and gathered unit by unit when needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..core.accelerator import is_streaming
from ..core.config import resumable_field
from ..core.contracts import Objective
from ..core.errors import ConfigError
from .clipping import sum_norms
from .engine_kind import Costs, EngineKind, Sizes, autocast_bytes, replicated_costs
from .ranked import PlainCopy, RankedEngine, RankedEngineConfig, Root
from .shard_slices import Span


class Fsdp2EngineConfig(RankedEngineConfig):
    """Like `ddp`, with everything sharded."""

    kind: Literal["fsdp2"] = resumable_field("fsdp2", "Kind of the engine: an entry of sparo.engines.")
    reshard_after_forward: bool = resumable_field(
        True,
        "Free a block's gathered parameters between forward and backward. Saves memory, but adds an all-gather per block.",
    )
    shard_size: int | None = resumable_field(
        None,
        "Number of ranks that share one copy of the parameters (HSDP); usually the GPUs of a node. Default: all ranks.",
        gt=0,
    )
    param_dtype: Literal["fp32", "bf16"] | None = resumable_field(
        None,
        "Dtype of gathered parameters and computation. Default: the dtype of engine.precision.",
        with_kind=True,
        examples=["bf16"],
    )
    reduce_dtype: Literal["fp32", "bf16"] = resumable_field(
        "fp32", "Dtype in which gradients are reduced.", with_kind=True
    )
    cpu_offload: bool = resumable_field(False, "Keep parameter shards and optimizer state in host memory.")


class Fsdp2Engine(RankedEngine):
    """Engine with FSDP2.

    Order of preparation: activation checkpointing, device, compile, `fully_shard` of each unit and then of the root,
    optimizer. Units are sharded after they are compiled, so that their hooks stay outside the graph. The optimizer is
    last, because it holds the shards. 0-d parameters cannot be sharded. These, and the parameters that the loss itself
    uses, stay whole, and the engine averages their gradients. `LocalEngine.step` clips and steps.
    """

    kind = "fsdp2"
    config: Fsdp2EngineConfig

    def prepare(self, objective: Objective) -> None:
        # Copy now, while the model is an ordinary module, because sharded modules cannot be copied whole.
        self._plain = PlainCopy(objective, self.ranks, self.device)
        super().prepare(objective)

    def wrap(self, objective: Objective) -> None:
        config, size = self.config, self.ranks.size
        self._root = Root(objective)
        self._unsharded_params: list[torch.nn.Parameter] = []
        if size == 1:
            if config.cpu_offload:
                raise ConfigError(
                    "engine.cpu_offload: needs several ranks, got one. Start more ranks, or remove cpu_offload."
                )
            return
        shard = config.shard_size or size
        if size % shard:
            raise ConfigError(f"engine.shard_size={shard}: does not divide {size} ranks")
        # A whole parameter cannot be averaged into the shards of its copy.
        own = set(objective.loss_parameters())
        unsharded_params = {p for p in objective.parameters() if p.ndim == 0} | own
        unsharded_params |= {average for average, p in objective.ema_pairs() if p in own}
        # Sets have no fixed order, and ranks that reduce in different orders would deadlock.
        self._unsharded_params = [
            p for p in objective.parameters() if p in unsharded_params
        ]  # in the same order on every rank
        shape, names = ((size,), ("shard",)) if shard == size else ((size // shard, shard), ("replicate", "shard"))
        low = (
            torch.bfloat16 if (config.param_dtype or config.precision) == "bf16" else None
        )  # None: the dtype of the parameters
        if low is not None and config.precision != "bf16" and objective.exact_inputs:
            raise ConfigError(
                f"engine.param_dtype=bf16: {type(objective).__name__} needs fp32 inputs, but layers with bf16 "
                f"weights accept fp32 inputs only under autocast, got engine.precision={config.precision}. Set "
                "engine.precision=bf16, or param_dtype=fp32."
            )
        # Sums of 16-bit gradients lose small values, so the default is fp32.
        reduced = torch.bfloat16 if config.reduce_dtype == "bf16" else low and torch.float32
        with self.ranks.error_context("sharding the model"):
            common: dict[str, Any] = {
                "mesh": init_device_mesh(self.device.type, shape, mesh_dim_names=names),
                "mp_policy": MixedPrecisionPolicy(low, reduced, cast_forward_inputs=not objective.exact_inputs),
                "offload_policy": CPUOffloadPolicy(pin_memory=is_streaming(self.device))
                if config.cpu_offload
                else OffloadPolicy(),
                "reshard_after_forward": config.reshard_after_forward,
                "ignored_params": unsharded_params,
            }
            # From the inside out, because the root takes the remaining parameters.
            for unit in objective.shard_units():
                fully_shard(unit, **common)
            fully_shard(self._root, **{**common, "reshard_after_forward": False})  # backward needs it first

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the `last` micro-batch, each rank holds its rows of the mean over ranks."""
        if self.ranks.size > 1:
            # Earlier micro-batches keep whole gradients, and the sum is sent once.
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
        super().backward(total, last=last)
        if last and self.ranks.size > 1:
            with self.ranks.error_context("averaging gradients"):
                for p in self._unsharded_params:
                    if p.grad is not None:
                        dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                        # Gloo has no mean.
                        p.grad.div_(self.ranks.size)

    def _norms(self) -> dict[int, Tensor]:
        return sum_norms(self.objective, self._own_gradients(), self.ranks, self.device)

    def full_model(self) -> AbstractContextManager[Objective]:
        return self._plain.fill(self._gather_weights)

    def _own_gradients(self) -> dict[int, Tensor]:
        """Return this rank's shards. Those of a parameter on several ranks count once."""
        shards: dict[int, Tensor] = {}
        for key, gradient in self._gradients().items():
            span = Span.from_tensor(gradient)
            if span.copy == 0 if isinstance(gradient, DTensor) else self.ranks.rank == 0:
                shards[key] = span.local
        return shards

    def _gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.objective.state_dict().items():
            if isinstance(tensor, DTensor):
                # Shards may be on the host, where nccl cannot gather.
                tensor = tensor.to(self.device).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            # Whole only while it is copied, because the caller takes one tensor at a time.
            yield name, tensor


def _costs(config: Fsdp2EngineConfig, sizes: Sizes, ranks: int) -> Costs:
    if ranks == 1:
        return replicated_costs(config, sizes, ranks)
    p, t = sizes.parameters, sizes.learning
    width = 2 if (config.param_dtype or config.precision) == "bf16" else 4
    reduced = 2 if config.reduce_dtype == "bf16" else 4
    shard = min(config.shard_size or ranks, ranks)
    inside, copies = (shard - 1) / shard, ranks // shard
    again = p - sizes.outside if config.reshard_after_forward else 0  # gathered again for backward
    cast = autocast_bytes(config, sizes) if width == 4 else 0
    gathered = width * (sizes.live if config.reshard_after_forward else p) + cast
    sent = inside * (width * (p + again) + reduced * t) + 2 * (copies - 1) / copies * reduced * t / shard
    states = (4 * p / shard, 4 * t / shard, sizes.moments / shard)
    if config.cpu_offload:
        return Costs(0, 0, 0, gathered, sent, host=sum(states))
    return Costs(*states, gathered, sent)


ENGINE = EngineKind(Fsdp2EngineConfig, Fsdp2Engine, _costs)
