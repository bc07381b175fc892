"""Registry entries of engines, and their costs per rank: fp32 weights, gradients, optimizer state and communication.

Activations and the loss's features are not part of the costs, because they do not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.contracts import Engine, Objective
from ..core.distributed import Ranks
from .optim import OptimConfig


class Sizes(NamedTuple):
    """Numbers of parameters for cost estimates.

    Attributes:
        parameters, largest_unit, outside: parameters in total, in the largest shard unit, and outside all units.
        trained: trained parameters; None: all.
        state_tensors: fp32 tensors of a parameter's size that the optimizer keeps for it; 2 for AdamW.
    """

    parameters: int
    largest_unit: int
    outside: int
    trained: int | None = None
    state_tensors: int = 2

    @staticmethod
    def from_objective(objective: Objective, state_tensors: int = 2) -> Sizes:
        parameters = sum(p.numel() for p in objective.parameters())
        # An average of weights is sharded, too, but a training step never gathers it.
        computing = {id(unit) for unit in objective.compile_units()}
        shards = objective.shard_units()
        units = [sum(p.numel() for p in unit.parameters()) for unit in shards if id(unit) in computing]
        outside = parameters - sum(p.numel() for unit in shards for p in unit.parameters())
        trained = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        return Sizes(parameters, max(units, default=0), outside, trained, state_tensors)

    @property
    def learning(self) -> int:
        """Return the number of parameters with gradients and moments."""
        return self.parameters if self.trained is None else self.trained

    @property
    def moments(self) -> int:
        """Return the bytes of optimizer state of all trained parameters."""
        return 4 * self.state_tensors * self.learning

    @property
    def live(self) -> int:
        """Return the number of gathered parameters: those outside units, the unit that computes, and the unit that is being gathered."""
        return self.outside + 2 * self.largest_unit


class Costs(NamedTuple):
    """Bytes on one rank. `gathered` is the peak of temporarily whole parameters; `sent` is per optimizer step without accumulation.

    Weights, gradients and optimizer state are on the device, or in `host` memory if they are offloaded.
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


@dataclass(frozen=True)
class EngineKind:
    """Entry of `sparo.engines`.

    Args:
        config: the recipe's `engine` block, a `DeviceConfig`.
        build: returns the engine of this rank.
        costs: returns the costs on a number of ranks; collectives are counted as rings.
        one_process: the engine does not support several ranks.
    """

    config: type[Any]
    build: Callable[[Any, OptimConfig, Ranks], Engine]
    costs: Callable[[Any, Sizes, int], Costs]
    one_process: bool = False


def autocast_bytes(config: Any, sizes: Sizes) -> float:
    """Return the bytes of autocast's 16-bit weights that backward keeps; checkpointed units keep them only while recomputed."""
    # Autocast keeps cast weights for the backward, which frozen weights do not have.
    return 0 if config.precision == "fp32" else 2 * (sizes.live if config.grad_checkpointing else sizes.learning)


def replicated_costs(config: Any, sizes: Sizes, ranks: int) -> Costs:
    """Return the costs of an engine with everything on every rank and all-reduced gradients."""
    p, t = sizes.parameters, sizes.learning
    # A ring sends each gradient twice, except for the rank's own share.
    return Costs(4 * p, 4 * t, sizes.moments, autocast_bytes(config, sizes), 2 * (ranks - 1) / ranks * 4 * t)
