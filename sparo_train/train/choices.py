"""Keys that a recipe with `auto` leaves open, chosen from the data, the initial weights and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.accelerator import find_device
from ..core.config import resolve
from ..core.errors import ConfigError, DataError
from ..core.recipe.layers import Tree, merge
from ..core.registries import METHODS
from ..data.examples.survey import survey
from ..data.sources.base import DataConfig, open_source
from ..objectives.method import Choice, Situation


def with_choices(tree: Tree) -> tuple[Tree, list[Choice]]:
    """Return a recipe with the keys that its method chooses, and these choices. Keys that the recipe sets stay.

    Raises:
        ConfigError: the method has no choices, or the recipe names no data.
        DataError: the data cannot be read.
    """
    objective = tree.get("objective")
    kind = objective.get("kind", "clip") if isinstance(objective, Mapping) else "clip"
    choose = METHODS.get(kind, "objective.kind").choose
    if choose is None:
        raise ConfigError(
            f"auto: objective.kind={kind} has no keys whose values can be chosen from the data. Set auto=off."
        )
    if tree["auto"] not in ("here", "cpu", "gpu"):
        raise ConfigError(f"auto: expected `off`, `here`, `cpu` or `gpu`, got {tree['auto']}.")
    chosen = [choice for choice in choose(_situation(tree)) if _look_up(tree, choice.key) is None]
    for choice in chosen:
        patch: Any = choice.value
        for key in reversed(choice.key.split(".")):
            patch = {key: patch}
        tree = merge(tree, patch)
    return tree, chosen


def _situation(tree: Tree) -> Situation:
    data = tree.get("data")
    if not isinstance(data, Mapping) or not data.get("sources"):
        raise ConfigError("data: names no images. Add data=FOLDER to the command.")
    config = resolve(DataConfig, dict(data), "data")
    try:
        sources = [open_source(name, source) for name, source in config.sources.items()]
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}. To train on other images, add data=FOLDER.") from None
    engine = tree.get("engine")
    device = engine.get("device", "auto") if isinstance(engine, Mapping) else "auto"
    gpu = tree["auto"] == "gpu" or (tree["auto"] == "here" and find_device(device, "engine.device").type != "cpu")
    images = sum(source.samples for source in sources)
    is_given = _look_up(tree, "data.pixel_range") is not None
    if config.bands is None or is_given:
        found = survey(sources, config)
        if found.full_range is not None and not is_given:
            used = survey(sources, config.model_copy(update={"pixel_range": found.full_range}))
            found = used._replace(used_bits=found.used_bits)
        return Situation(tree, images, found, gpu)
    # Any values can be read by percentiles. Mean and standard deviation depend on the range, so they are measured again
    # with the one that will be chosen.
    found = survey(sources, config.model_copy(update={"pixel_range": "percentiles"}))
    if found.low:
        found = survey(sources, config.model_copy(update={"pixel_range": found.ranges}))
    return Situation(tree, images, found, gpu)


def _look_up(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
