"""Shipped recipes by name, and the file that a recipe argument refers to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sparo_train.core.errors import ConfigError, did_you_mean

from . import config_folders

if TYPE_CHECKING:
    from sparo_train.train.run_config import RunConfig

# pattern in the header's line "Hardware:", heading of the list
HARDWARE = ((r"two CPU cores", "Runs on a laptop"), (r"one GPU", "Needs one GPU"), (r"GPUs", "Needs several GPUs"))
_NON_RECIPE_FOLDERS = ("clusters", "sweeps", "tasks")  # folders of configs/ without recipes


class ShippedRecipe(NamedTuple):
    """A shipped recipe.

    Attributes:
        name: its path in configs/ without the suffix.
        line: first sentence of its header.
        hardware: entry of `HARDWARE`, from the header's line "Hardware:".
    """

    name: str
    path: Path
    line: str
    hardware: str


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all of them, by name. Files that begin with `_` are parents of others."""
    root = next((folder for folder in config_folders() if folder.is_dir()), None)
    paths_by_name = {path.relative_to(root): path for path in sorted(root.glob("*/**/*.yaml"))} if root else {}
    return [
        ShippedRecipe(place.with_suffix("").as_posix(), path, *_header(path))
        for place, path in paths_by_name.items()
        if place.parts[0] not in _NON_RECIPE_FOLDERS and not path.name.startswith("_")
    ]


def _header(path: Path) -> tuple[str, str]:
    lines = [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").split("\n")]
    needs = next((line for line in lines if line.startswith("Hardware:")), "")
    return lines[0], next((heading for pattern, heading in HARDWARE if re.search(pattern, needs)), "Others")


def recipe(name: str) -> Path:
    """Return the path of a shipped file in configs/, e.g. `clip/scenes_tiny.yaml`."""
    for root in config_folders():
        if (root / name).is_file():
            return root / name
    raise ConfigError(f"recipe {name!r} is not in this installation. Run from a checkout, or reinstall.")


def find_recipe(name_or_path: Path) -> Path:
    """Return the file that a recipe argument refers to: a path, or the name of a shipped recipe or sweep.

    Names are those below configs/ (`emoji_small`, `clip/scenes_tiny`, `sweeps/sparo_table6`).

    Raises:
        ConfigError: neither, or a name that two recipes have; with suggestions.
    """
    # The user's own file takes precedence over ours of the same name.
    if name_or_path.exists():
        return name_or_path
    text = name_or_path.as_posix()
    short = text.removeprefix("configs/").removesuffix(".yaml")
    if short.startswith("sweeps/"):
        return recipe(f"{short}.yaml")
    shipped = {own.name: own.path for own in shipped_recipes()}
    matches = [name for name in shipped if name == short or name.endswith(f"/{short}")]
    if len(matches) == 1 and not name_or_path.suffix:
        return shipped[matches[0]]
    if matches:
        written = " or ".join(matches)
        missing = f"{text}: no such file" if name_or_path.suffix else f"{text}: {len(matches)} recipes have this name"
        raise ConfigError(f"{missing}. Write {written} to use a shipped recipe.")
    # A long path was mistyped, so similar names of recipes would not help.
    if not name_or_path.suffix and len(name_or_path.parts) < 4:
        raise ConfigError(
            f"{text}: not a recipe. `sparo recipes` lists all recipes; {did_you_mean(text, _names(shipped))}"
        )
    return name_or_path  # reading it reports its errors


def load_run(recipe: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe (a path, or the name of a shipped recipe) with its parents and overrides. Raises `ConfigError`."""
    from sparo_train.train.run_config import load_run as load  # imports torch, which a list of recipes does not need

    return load(find_recipe(Path(recipe)), overrides)


def _names(shipped: dict[str, Path]) -> list[str]:
    return [*shipped, *(name.rpartition("/")[2] for name in shipped)]
