"""Where the shipped recipes are: `configs/` of a checkout, or the copy inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

from sparo_train.core.errors import ConfigError


def recipe(name: str) -> Path:
    """The path of a shipped recipe, e.g. `clip/scenes_tiny.yaml`."""
    here = Path(__file__).resolve().parent
    for root in (here.parent / "configs", here / "configs"):
        if (root / name).is_file():
            return root / name
    raise ConfigError(f"recipe {name!r} is not in this installation; run from a checkout or reinstall")
