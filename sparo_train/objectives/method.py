"""Methods: entries of `sparo.methods`. Code that needs something of a method asks its entry, and never compares names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..core.config import Frozen
from ..core.contracts import Objective
from ..core.recipe.config_keys import value_text
from ..data.examples.survey import Survey
from ..data.read.loader import Examples
from ..data.sources.base import DataConfig
from ..engine.device_context import DeviceConfig

_PAIR_KEYS = ("crop_scale", "hflip", "trim_text")  # keys of `DataConfig` for image-text pairs only


C_co = TypeVar("C_co", covariant=True)


class RecipeBlocks(Protocol[C_co]):
    """Blocks and keys of a recipe that the rules of a method may check; `objective` is the method's own config."""

    @property
    def objective(self) -> C_co: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def engine(self) -> DeviceConfig: ...

    @property
    def micro_batch_size(self) -> int | None: ...

    @property
    def start_from(self) -> Any: ...


def accept_any(recipe: RecipeBlocks[Any]) -> None:
    """Accept any combination of blocks."""


def refuse_pair_keys(data: DataConfig, instead: str) -> None:
    """Raise `ValueError` if a recipe sets keys for image-text pairs, and name the block of keys to use instead."""
    for key in _PAIR_KEYS:
        if getattr(data, key) != type(data).model_fields[key].default:
            raise ValueError(
                f"data.{key}: applies to image-text pairs only, not to this objective. Remove it, and use {instead}."
            )


class Choice(NamedTuple):
    """Value that a method chooses for a key that the recipe leaves open."""

    key: str
    value: Any
    reason: str

    @property
    def text(self) -> str:
        return f"auto: {self.key}={value_text(self.value)} ({self.reason})"


class Situation(NamedTuple):
    """Facts from which the choices of a recipe with `auto` follow.

    Attributes:
        recipe: the keys that the recipe sets.
        images: number of training images.
        survey: formats, sizes and colours of some of them.
        gpu: train on a GPU.
    """

    recipe: Mapping[str, Any]
    images: int
    survey: Survey
    gpu: bool


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
        choose: chooses keys for recipes with `auto`; None: the method supports no such recipes.
        bands: it reads `data.bands`.
        objective_of_weights: makes the objective of trained weights without files that only training needs, such as a
            teacher's; None: `objective`.
    """

    config: type[Frozen]
    objective: Callable[[Any], Objective]
    examples: Callable[[Any, DataConfig], Examples]
    rules: Callable[[RecipeBlocks[Any]], None] = accept_any
    exports: tuple[str, ...] = ()
    loss_keys: tuple[str, ...] | None = None
    choose: Callable[[Situation], Sequence[Choice]] | None = None
    bands: bool = False
    objective_of_weights: Callable[[Any, Mapping[str, Tensor]], Objective] | None = None
