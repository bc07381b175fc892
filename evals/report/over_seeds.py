"""Runs that differ in their seed alone, as one row: the median, and the range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from sparo_train.core.errors import ConfigError
from sparo_train.core.untrusted import read_text

from .paper_tables import Cell, Grid, Row

_FREE = ("seed", "name", "out", "log", "world_size")  # what two seeds of one recipe may differ in


def over_seeds(table: Grid) -> Grid:
    """The table with a row per recipe.

    Raises:
        ConfigError: a row that is no run, whose recipe nobody knows; or no two rows of one recipe.
    """
    groups: dict[str, list[Row]] = {}
    own = [row for row in table.rows if not row.paper]
    for row in own:
        groups.setdefault(_recipe(row.name), []).append(row)
    if all(len(rows) == 1 for rows in groups.values()):
        raise ConfigError(
            "--seeds: no two of these runs are of one recipe; `sparo launch train RECIPE --seeds 3` makes some"
        )
    rows = [Row(_name([r.name for r in rows]), _cells(rows)) for rows in groups.values()]
    rows += [row for row in table.rows if row.paper]
    return table._replace(rows=rows, spans="median, and range over seeds")


def _cells(rows: Sequence[Row]) -> list[Cell | None]:
    found: list[Cell | None] = []
    for column in zip(*(row.cells for row in rows), strict=True):
        cells = [cell for cell in column if cell is not None]
        values = [cell.value for cell in cells]
        one = Cell(statistics.median(values), min(values), max(values), any(c.odd for c in cells)) if values else None
        found.append(one)
    return found


def _recipe(name: str) -> str:
    """What a run was trained with, less its seed. A checkpoint below its run's folder is the run's."""
    place = Path(name)
    for folder in (place, *place.parents[:2]):
        if (folder / "config.yaml").is_file():
            try:
                tree = yaml.safe_load(read_text(folder / "config.yaml"))
                return yaml.safe_dump({key: value for key, value in tree.items() if key not in _FREE})
            except (yaml.YAMLError, AttributeError):
                break
    raise ConfigError(
        f"--seeds: {name} is no run with a config.yaml, which says what it was trained with; leave it away"
    )


def _name(names: Sequence[str]) -> str:
    """What the names begin with, and how many they are."""
    first = names[0]
    shared = next(i for i in range(len(first) + 1) if i == len(first) or any(n[i : i + 1] != first[i] for n in names))
    stem = first[:shared].rstrip("0123456789").removesuffix("seed").removesuffix("-s").rstrip("-_/. ")
    return f"{stem or first} ({len(names)} seeds)" if len(names) > 1 else first
