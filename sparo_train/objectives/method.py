"""What a method is: one value, which `sparo.methods` names. Whoever needs something of a method asks it; nobody asks which one it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.config import Frozen
from ..core.contracts import Objective
from ..data.read.loader import Examples
from ..data.read.sources import DataConfig


def no_rules(run: Any) -> None:
    """Any blocks go together."""


@dataclass(frozen=True)
class Method:
    """A row of `sparo.methods`.

    Args:
        config: the recipe's `objective` block, with `kind: Literal[NAME] = NAME`.
        objective: config to the objective, its modules initialised from torch's random stream.
        examples: (config, the recipe's `data` block) to what batches are made of.
        rules: told the whole recipe; raises `ValueError`, beginning with the dotted key, where blocks do not go together.
        exports: rows of `sparo.exports` that write its runs, the default first.
        loss_keys: of its block, dotted: what makes two runs' losses other numbers than each other's; None: all but `model`.

    What encodes with a trained objective is the row of the same name in `sparo.encoders`.
    """

    config: type[Frozen]
    objective: Callable[[Any], Objective]
    examples: Callable[[Any, DataConfig], Examples]
    rules: Callable[[Any], None] = no_rules
    exports: tuple[str, ...] = ()
    loss_keys: tuple[str, ...] | None = None
