"""What each engine keeps and sends, per rank, from the number of parameters: fp32 weights, gradients and two Adam moments.

Activations and the loss's features are not in it: they do not depend on the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core.contracts import Objective
from .deepspeed import DeepSpeedEngineConfig
from .fsdp2 import Fsdp2EngineConfig
from .local import DeviceConfig


class Sizes(NamedTuple):
    """Parameters: all of them, those of the largest shard unit, and those outside of all units."""

    parameters: int
    largest_unit: int
    outside: int

    @staticmethod
    def of(objective: Objective) -> Sizes:
        parameters = sum(p.numel() for p in objective.parameters())
        units = [sum(p.numel() for p in unit.parameters()) for unit in objective.shard_units()]
        return Sizes(parameters, max(units, default=0), parameters - sum(units))


class Costs(NamedTuple):
    """Bytes on one rank. `gathered`: most that is whole for a moment; `sent`: in one optimizer step without accumulation.

    Weights, gradients and optimizer are on the device, or all of them in `host` memory where they are offloaded.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    sent: float
    host: float = 0.0

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer


def costs(config: DeviceConfig, sizes: Sizes, ranks: int) -> Costs:
    """Of an engine with this recipe block on so many ranks; collectives are counted as rings."""
    p, share = sizes.parameters, (ranks - 1) / ranks
    live = (
        sizes.outside + 2 * sizes.largest_unit
    )  # what is outside of units stays; one unit computes while the next arrives
    # Backward keeps autocast's 16-bit copies of the weights; of checkpointed units only while one is computed again.
    casts = 0 if config.precision == "fp32" else 2 * (live if config.grad_checkpointing else p)
    if isinstance(config, Fsdp2EngineConfig) and ranks > 1:
        return _fsdp2(config, sizes, ranks, live, casts)
    if isinstance(config, DeepSpeedEngineConfig):
        if config.stage == 3:
            return Costs(4 * p / ranks, 4 * p / ranks, 8 * p / ranks, 4 * live + casts, share * (2 * 4 * p + 4 * p))
        gradients = 4 * p if config.stage == 1 else 4 * p / ranks
        # Master weights beside the ones to compute with, although both are fp32; gradients are all-reduced.
        return Costs(4 * p, gradients, 12 * p / ranks, casts, share * (2 * 4 * p + 4 * p))
    return Costs(4 * p, 4 * p, 8 * p, casts, 2 * share * 4 * p)


def _fsdp2(config: Fsdp2EngineConfig, sizes: Sizes, ranks: int, live: int, casts: float) -> Costs:
    p = sizes.parameters
    width = 2 if (config.param_dtype or config.precision) == "bf16" else 4
    reduced = 2 if config.reduce_dtype == "bf16" else 4
    shard = min(config.shard_size or ranks, ranks)
    inside, copies = (shard - 1) / shard, ranks // shard
    again = p - sizes.outside if config.reshard_after_forward else 0  # gathered once more for backward
    gathered = width * (live if config.reshard_after_forward else p) + (casts if width == 4 else 0)
    sent = inside * (width * (p + again) + reduced * p) + 2 * (copies - 1) / copies * reduced * p / shard
    states = (4 * p / shard, 4 * p / shard, 8 * p / shard)
    if config.cpu_offload:
        return Costs(0, 0, 0, gathered, sent, host=sum(states))
    return Costs(*states, gathered, sent)
