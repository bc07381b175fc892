"""Methods: entries of `sparo.methods`. Code that needs something of a method asks its entry, and never compares names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.config import Frozen
from ..core.contracts import Objective
from ..data.read.loader import Examples
from ..data.sources.base import DataConfig


def no_rules(run: Any) -> None:
    """Accept any combination of blocks."""


@dataclass(frozen=True)
class Method:
    """Entry of `sparo.methods`.

    Encoders of trained objectives are entries of the same name in `sparo.encoders`.

    Args:
        config: the recipe's `objective` block, with `kind: Literal[NAME] = NAME`.
        objective: makes the objective from its config, with modules initialised from torch's random stream.
        examples: makes the examples of a batch from (config, the recipe's `data` block).
        rules: checks the whole recipe; raises `ValueError`, beginning with the dotted key, if blocks cannot be
            combined.
        exports: entries of `sparo.exports` that write its runs, the default first.
        loss_keys: dotted keys of its block that must be equal for the losses of two runs to be comparable; None: all
            except `model`.
    """

    config: type[Frozen]
    objective: Callable[[Any], Objective]
    examples: Callable[[Any, DataConfig], Examples]
    rules: Callable[[Any], None] = no_rules
    exports: tuple[str, ...] = ()
    loss_keys: tuple[str, ...] | None = None
