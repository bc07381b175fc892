"""Which `sparo data` command makes the data that a recipe reads; shown where it is missing."""

from __future__ import annotations

from pathlib import Path

# The folder below data/ that a command fills by default. Recipes for published data use other folders, so that a hint never names a
# command that makes another data set than the recipe's.
_COMMANDS = {
    "emoji": "sparo data emoji",
    "scenes": "sparo data scenes",
    "fashion_mnist": "sparo data fashion-mnist",
    "tetrominoes": "sparo data tetrominoes",
    "clevr": "sparo data objects clevr",
    "clevr3": "sparo data objects clevr data/clevr3 --max-objects 3 --size 32 --antialias 2 --train 30000",
    "clevr3_64": "sparo data objects clevr data/clevr3_64 --max-objects 3 --size 64 --train 50000",
    "clevrtex": "sparo data objects clevrtex",
    "rooms": "sparo data objects rooms",
    "movi_small": "sparo data movi-like",
    **{f"movi_{kind}": f"sparo data movi-like --kind {kind}" for kind in "abcde"},
    "scenes3d_small": "sparo data scenes3d",
    **{f"scenes3d_{kind}": f"sparo data scenes3d --kind {kind}" for kind in ("simple", "nature_ego")},
    "mine": "sparo data convert photos.csv data/mine --test 200",
}


def remedy(place: str | Path) -> str:
    """Return `; COMMAND makes it` for a relative path data/NAME/… that a command fills, else an empty string."""
    folder, *below = Path(place).parts or ("",)
    command = _COMMANDS.get(below[0]) if folder == "data" and below else None
    return f"; `{command}` makes it" if command else ""
