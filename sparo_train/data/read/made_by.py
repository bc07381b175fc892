"""Which command makes the data that a recipe of ours reads: said where it is missing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

_COMMANDS = {
    "emoji": "sparo data emoji",
    "scenes": "sparo data scenes",
    "fashion_mnist": "sparo data fashion-mnist",
    "tetrominoes": "sparo data tetrominoes",
    "clevr": "sparo data objects clevr",
    "clevrtex": "sparo data objects clevrtex",
    "rooms": "sparo data objects rooms",
    "movi_small": "sparo data movi-like",
    **{f"movi_{kind}": f"sparo data movi-like --kind {kind}" for kind in "abcde"},
    "scenes3d_small": "sparo data scenes3d",
    **{f"scenes3d_{kind}": f"sparo data scenes3d --kind {kind}" for kind in ("simple", "nature_ego")},
    "mine": "sparo data convert IMAGES data/mine --test 200",
}


def remedy(place: str | Path) -> str:
    """`; COMMAND makes it` for a place below data/NAME that a command of ours fills, else nothing."""
    parts = Path(place).parts
    names = [name for folder, name in pairwise(parts) if folder == "data"]
    command = next((_COMMANDS[name] for name in names if name in _COMMANDS), None)
    return f"; `{command}` makes it" if command else ""
