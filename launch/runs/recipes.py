"""The recipes that come with sparo, by name."""

from __future__ import annotations

from pathlib import Path

from sparo_train.core.errors import ConfigError

from ..shipped import configs


def recipe(name: str) -> Path:
    """The path of a shipped recipe, e.g. `clip/scenes_tiny.yaml`."""
    for root in configs():
        if (root / name).is_file():
            return root / name
    raise ConfigError(f"recipe {name!r} is not in this installation; run from a checkout or reinstall")
