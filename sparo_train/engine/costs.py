"""What each engine keeps and sends, per rank, from the number of parameters: fp32 weights, gradients and two Adam moments.

Activations and the loss's features are not in it: they do not depend on the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from .deepspeed import DeepSpeedEngineConfig
from .fsdp2 import Fsdp2EngineConfig
from .local import DeviceConfig


class Sizes(NamedTuple):
    """Parameters: all of them, those of the largest shard unit, and those outside of all units."""

    parameters: int
    largest_unit: int
    outside: int


class Costs(NamedTuple):
    """Bytes on one rank. `gathered`: most that is whole for a moment; `sent`: in one optimizer step without accumulation."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    sent: float

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer


def costs(config: DeviceConfig, sizes: Sizes, ranks: int) -> Costs:
    """Of an engine with this recipe block on so many ranks; collectives are counted as rings."""
    p, share = sizes.parameters, (ranks - 1) / ranks
    low = 2 if config.precision == "bf16" else 0  # autocast keeps 16-bit copies of the weights until the forward ends
    if isinstance(config, Fsdp2EngineConfig) and ranks > 1:
        width = 2 if (config.param_dtype or config.precision) == "bf16" else 4
        reduced = 2 if config.reduce_dtype == "bf16" else 4
        shard = min(config.shard_size or ranks, ranks)
        inside, copies = (shard - 1) / shard, ranks // shard
        again = config.reshard_after_forward
        # The root stays whole; of the units one computes while the next arrives.
        gathered = width * (sizes.outside + 2 * sizes.largest_unit if again else p)
        sent = inside * p * ((2 if again else 1) * width + reduced) + 2 * (copies - 1) / copies * reduced * p / shard
        return Costs(4 * p / shard, 4 * p / shard, 8 * p / shard, gathered, sent)
    if isinstance(config, DeepSpeedEngineConfig):
        if config.stage == 3:
            live = 4 * (sizes.outside + 2 * sizes.largest_unit)
            return Costs(4 * p / ranks, 4 * p / ranks, 8 * p / ranks, live, share * (2 * 4 * p + 4 * p))
        gradients = 4 * p if config.stage == 1 else 4 * p / ranks
        # Master weights beside the ones to compute with, although both are fp32.
        return Costs(4 * p, gradients, 12 * p / ranks, low * p, share * (4 * p + 4 * p))
    return Costs(4 * p, 4 * p, 8 * p, low * p, 2 * share * 4 * p)
