"""What an engine is to a recipe, and what it keeps and sends per rank: fp32 weights, gradients and the optimizer's state.

Activations and the loss's features are not in the costs: they do not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.contracts import Engine, Objective
from ..core.distributed import Ranks
from .optim import OptimConfig


class Sizes(NamedTuple):
    """Numbers of parameters: all, those of the largest shard unit, those outside of all units, and the trained ones (None: all).

    state_tensors: fp32 tensors of a parameter's size that the optimizer keeps for it; 2 for AdamW.
    """

    parameters: int
    largest_unit: int
    outside: int
    trained: int | None = None
    state_tensors: int = 2

    @staticmethod
    def of(objective: Objective, state_tensors: int = 2) -> Sizes:
        parameters = sum(p.numel() for p in objective.parameters())
        units = [sum(p.numel() for p in unit.parameters()) for unit in objective.shard_units()]
        trained = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        return Sizes(parameters, max(units, default=0), parameters - sum(units), trained, state_tensors)

    @property
    def learning(self) -> int:
        """Those with gradients and moments."""
        return self.parameters if self.trained is None else self.trained

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's state of all trained parameters."""
        return 4 * self.state_tensors * self.learning

    @property
    def live(self) -> int:
        """Of an engine that gathers unit by unit: what is outside of units stays; one computes while the next arrives."""
        return self.outside + 2 * self.largest_unit


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


@dataclass(frozen=True)
class EngineKind:
    """A row of `sparo.engines`.

    Args:
        config: the recipe's `engine` block, a `DeviceConfig`.
        build: to the engine of this rank.
        costs: of this block on so many ranks; collectives are counted as rings.
        one_process: it takes no part in a run of several ranks.
    """

    config: type[Any]
    build: Callable[[Any, OptimConfig, Ranks], Engine]
    costs: Callable[[Any, Sizes, int], Costs]
    one_process: bool = False


def casts(config: Any, sizes: Sizes) -> float:
    """Bytes of autocast's 16-bit copies of weights that backward keeps; of checkpointed units only while one is computed again."""
    # Autocast keeps each cast weight for the backward.
    return 0 if config.precision == "fp32" else 2 * (sizes.live if config.grad_checkpointing else sizes.parameters)


def replicated(config: Any, sizes: Sizes, ranks: int) -> Costs:
    """Everything on every rank; gradients are all-reduced."""
    p, t = sizes.parameters, sizes.learning
    # A ring sends a gradient twice, each time all but its own share.
    return Costs(4 * p, 4 * t, sizes.moments, casts(config, sizes), 2 * (ranks - 1) / ranks * 4 * t)
