"""Runs that only differ in their seed as one row: median and range, or mean and interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sparo_train.core.config import resolve, resumable_keys
from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.files import read_text
from sparo_train.core.recipe.layers import Tree
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.train.run_config import RunConfig

from .grid import Cell, Grid, Row
from .significance import mark_separated_best

_SEED_DEPENDENT_KEYS = (
    "seed",
    "name",
    "out",
    "log",
    "world_size",
)  # keys in which two seeds may differ, for a recipe that this version cannot read


class Spread(NamedTuple):
    """Summary of several seeds' values."""

    value: float
    low: float | None  # None for one seed
    high: float | None


def spread(values: Sequence[float], mean: bool = False) -> Spread:
    """Return median and range of seeds, or their mean and its 95 % interval (Student's t).

    The interval is not clipped to the score's range: with two seeds it may exceed it, which shows that two are too few.
    """
    if len(values) == 1:
        return Spread(values[0], None, None)
    if not mean:
        return Spread(statistics.median(values), min(values), max(values))
    from scipy import stats  # imports in seconds, and a median does not need it

    middle = statistics.fmean(values)
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return Spread(middle, middle - reach, middle + reach)


def difference(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the difference of means and its 95 % interval over seeds (Welch's t, without assuming equal variances or pairs)."""
    from scipy import stats  # as above

    between = statistics.fmean(values) - statistics.fmean(others)
    # One seed has no spread, and equal seeds have none either.
    if min(len(values), len(others)) < 2 or len({*values}) == len({*others}) == 1:
        return Spread(between, None, None)
    # Computed here, because scipy's test warns if all seeds of a row agree, which is valid.
    a, b = (statistics.variance(side) / len(side) for side in (values, others))
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (len(others) - 1))
    reach = float(stats.t.ppf(0.975, freedom)) * (a + b) ** 0.5
    return Spread(between, between - reach, between + reach)


def spread_caption(mean: bool, baseline: str = "") -> str:
    """Return the meaning of `spread`, or of `difference`, for a table's caption."""
    if baseline:
        return f"differences of means to {baseline}, and their 95 % intervals over seeds (Welch's t)"
    return "mean, and its 95 % interval over seeds (Student's t)" if mean else "median, and range over seeds"


def over_seeds(table: Grid, mean: bool = False, baseline: str | None = None) -> Grid:
    """Return the table with a row per recipe (`spread`), or with every row's `difference` to the row `baseline`.

    Raises:
        ConfigError: a row that is not a run, no two rows of one recipe, or no row `baseline`.
    """
    groups: dict[str, list[Row]] = {}
    own = [row for row in table.rows if not row.paper]
    for row in own:
        recipe, seed = split_seed(row.name)
        # The same seed twice would make the range too narrow.
        if any(split_seed(other.name)[1] == seed for other in groups.get(recipe, [])):
            raise ConfigError(
                f"--seeds: {row.name} has the same seed, {seed}, as another run of its recipe. Remove one of the two runs from the command."
            )
        groups.setdefault(recipe, []).append(row)
    if all(len(rows) == 1 for rows in groups.values()):
        raise ConfigError(
            "--seeds: all of these runs have different recipes. `sparo launch train RECIPE --seeds 3` trains three runs of one recipe."
        )
    named = [(_name([row.name for row in rows]), rows) for rows in groups.values()]
    printed = [row for row in table.rows if row.paper]
    if baseline is None:
        aggregate_rows = [Row(name, _cells(rows, mean), readout_cells=rows[0].readout_cells) for name, rows in named]
        return mark_separated_best(table._replace(rows=aggregate_rows + printed, spans=spread_caption(mean)))
    if printed:
        raise ConfigError(
            f"--baseline {baseline}: a comparison with a baseline needs seeds, and rows of the paper have none. Remove --paper."
        )
    stems = {name.removesuffix(f" ({len(rows)} seeds)"): rows for name, rows in named}
    if baseline not in stems:
        raise ConfigError(f"--baseline {baseline}: {did_you_mean(baseline, stems)}")
    others = stems[baseline]
    aggregate_rows = [
        Row(name, _cells(rows, mean, others), readout_cells=rows[0].readout_cells)
        for name, rows in named
        if rows is not others
    ]
    return table._replace(rows=aggregate_rows, spans=spread_caption(mean, baseline), best=())


def _cells(rows: Sequence[Row], mean: bool, others: Sequence[Row] | None = None) -> list[Cell | None]:
    """Return a cell for every column: `spread`, or with `others` the `difference` to them."""
    cells: list[Cell | None] = []
    for number, column in enumerate(zip(*(row.cells for row in rows), strict=True)):
        baseline_cells = [row.cells[number] for row in others or rows]
        values, baseline_values = (
            [cell.value for cell in side if cell is not None] for side in (column, baseline_cells)
        )
        metrics = {cell.metric for cell in (*column, *baseline_cells) if cell is not None}
        # With some seeds only, the number of seeds would differ from the row's.
        if len(values) < len(rows) or len(baseline_values) < len(baseline_cells) or len(metrics) > 1:
            cells.append(None)
            continue
        odd = any(cell is not None and cell.odd for cell in (*column, *baseline_cells))
        cells.append(
            Cell(*(spread(values, mean) if others is None else difference(values, baseline_values)), odd, *metrics)
        )
    return cells


def split_seed(name: str) -> tuple[str, Any]:
    """Return the recipe and scoring options of a row without the seed, and the seed. A checkpoint belongs to the run whose folder contains it."""
    path, bracket, how = name.partition(" (")  # options of scoring: slots, a limit
    place = Path(path)
    # RUN, RUN/checkpoints/step-…: all belong to one run.
    for folder in (place, *place.parents[:2]):
        if (folder / "config.yaml").is_file():
            tree = parse_yaml(read_text(folder / "config.yaml"), str(folder / "config.yaml"))
            if isinstance(tree, dict):
                recipe = _comparable_recipe(tree, str(folder / "config.yaml"))
                return f"{yaml.safe_dump(recipe)}{place.relative_to(folder)}{bracket}{how}", tree.get("seed")
    raise ConfigError(f"--seeds: {name} has no config.yaml, so it is not a run. Leave it out of the command.")


def _comparable_recipe(tree: Tree, origin: str) -> Tree:
    """Return a recipe as this version writes it (with today's defaults for missing keys), without its seed and keys that change no score."""
    try:
        config = resolve(RunConfig, tree, origin, stored=True)
    except ConfigError:  # keys that no longer exist, or a plug-in that is not installed
        return {key: value for key, value in tree.items() if key not in _SEED_DEPENDENT_KEYS}
    # Complete, so that an explicit default and a missing key are equal.
    recipe = config.model_dump(mode="json")
    for key in ("seed", *resumable_keys(config)):
        block: Any = recipe
        *above, last = key.split(".")
        for part in above:
            block = block.get(part, {})
        block.pop(last, None)
    return recipe


def _name(names: Sequence[str]) -> str:
    """Return the common beginning of the names, and their number."""
    first = names[0]
    shared = next(i for i in range(len(first) + 1) if i == len(first) or any(n[i : i + 1] != first[i] for n in names))
    # Remove the number of the seed: emoji-seed0 and emoji-seed1 become emoji.
    stem = first[:shared].rstrip("0123456789").removesuffix("seed").removesuffix("-s").rstrip("-_/. ")
    return f"{stem or first} ({len(names)} seeds)" if len(names) > 1 else first
