"""A recipe and its overrides, as every command takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # `sparo --help` needs none of it
    from sparo_train.train.run_config import RunConfig

ALLOW_UNKNOWN_OPTIONS = {"ignore_unknown_options": True}  # `--optim.lr 1e-3` is answered with how to write it


def _complete(incomplete: str) -> list[str]:
    from ..commands.recipes import shipped_recipes

    names = [own.name for own in shipped_recipes()]
    stems = [
        # A short name only where it is one recipe's.
        stem
        for name in names
        if [n.rpartition("/")[2] for n in names].count(stem := name.rpartition("/")[2]) == 1
    ]
    return [word for word in [*names, *stems] if word.startswith(incomplete)]


Recipe = Annotated[
    Path,
    typer.Argument(
        help="a YAML file, or the name of a recipe that comes with sparo: emoji_small (`sparo recipes`)",
        autocompletion=_complete,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="optim.lr=1e-3; +key=… adds an entry, key=null takes it away"),
]


def normalize_overrides(overrides: Sequence[str] | None) -> list[str]:
    """Overrides, with what stands behind `--key` drawn to it, so that an error can say how to write both."""
    normalized: list[str] = []
    for word in overrides or []:
        if normalized and normalized[-1].startswith("-") and "=" not in normalized[-1] and "=" not in word:
            normalized[-1] = f"{normalized[-1]}={word}"
        else:
            normalized.append(word)
    return normalized


def load_run_config(recipe: Path, overrides: Sequence[str] | None) -> RunConfig:
    """The resolved recipe that a user's words mean. Raises `ConfigError`."""
    from sparo_train.train.run_config import load_run

    from ..commands.recipes import find_recipe

    return load_run(find_recipe(recipe), normalize_overrides(overrides))


def refuse_keys_as_options(options: Sequence[str]) -> None:
    """Raise `ConfigError` where an option is a recipe's key and none of a cluster."""
    from sparo_train.core.recipe.layers import assignment
    from sparo_train.train.run_config import RunConfig

    from ..jobs.clusters import ClusterConfig

    for word in normalize_overrides(options):
        root = word.lstrip("-").partition("=")[0].partition(".")[0]
        if root in RunConfig.model_fields and root.replace("-", "_") not in ClusterConfig.model_fields:
            assignment(word, RunConfig)
