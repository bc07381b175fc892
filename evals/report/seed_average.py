"""Runs that differ in their seed alone, as one row: the median and the range, or the mean and its interval."""

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

from .paper_tables import Cell, Grid, Row

_SEED_DEPENDENT_KEYS = (
    "seed",
    "name",
    "out",
    "log",
    "world_size",
)  # of a recipe that this version cannot read: what two seeds may differ in


class Spread(NamedTuple):
    """What several seeds' numbers say of one quantity."""

    value: float
    low: float | None  # None of one seed
    high: float | None


def spread(values: Sequence[float], mean: bool = False) -> Spread:
    """The median and the range of seeds, or their mean and its 95 % interval (Student's t, not cut where a score ends: of two seeds it may
    reach far beyond, and says with it that two are too few)."""
    if len(values) == 1:
        return Spread(values[0], None, None)
    if not mean:
        return Spread(statistics.median(values), min(values), max(values))
    from scipy import stats  # seconds that a median needs none of

    middle = statistics.fmean(values)
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return Spread(middle, middle - reach, middle + reach)


def difference(values: Sequence[float], others: Sequence[float]) -> Spread:
    """The means' difference and its 95 % interval over seeds (Welch's t: neither the same spread nor pairs are assumed)."""
    from scipy import stats  # as above

    between = statistics.fmean(values) - statistics.fmean(others)
    # Of one seed nobody knows the spread; of seeds that are all alike there is none.
    if min(len(values), len(others)) < 2 or len({*values}) == len({*others}) == 1:
        return Spread(between, None, None)
    # Written out: scipy's test warns of a row whose seeds agree, which is no mistake here.
    a, b = (statistics.variance(side) / len(side) for side in (values, others))
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (len(others) - 1))
    reach = float(stats.t.ppf(0.975, freedom)) * (a + b) ** 0.5
    return Spread(between, between - reach, between + reach)


def spread_caption(mean: bool, baseline: str = "") -> str:
    """What stands in a table of `spread`, or of `difference` to a row."""
    if baseline:
        return f"differences of means to {baseline}, and their 95 % intervals over seeds (Welch's t)"
    return "mean, and its 95 % interval over seeds (Student's t)" if mean else "median, and range over seeds"


def over_seeds(table: Grid, mean: bool = False, baseline: str | None = None) -> Grid:
    """The table with a row per recipe; of `mean`, see `spread`; or with every row's `difference` to one of these, by its name.

    Raises:
        ConfigError: a row that is no run, whose recipe nobody knows; no two rows of one recipe; no row `baseline`.
    """
    groups: dict[str, list[Row]] = {}
    own = [row for row in table.rows if not row.paper]
    for row in own:
        recipe, seed = recipe_of(row.name)
        # Twice the same seed would make a range narrower than seeds are.
        if any(recipe_of(other.name)[1] == seed for other in groups.get(recipe, [])):
            raise ConfigError(
                f"--seeds: {row.name} is of seed {seed}, as another of its recipe is; leave one of them away"
            )
        groups.setdefault(recipe, []).append(row)
    if all(len(rows) == 1 for rows in groups.values()):
        raise ConfigError(
            "--seeds: no two of these runs are of one recipe; `sparo launch train RECIPE --seeds 3` makes some"
        )
    named = [(_name([row.name for row in rows]), rows) for rows in groups.values()]
    printed = [row for row in table.rows if row.paper]
    if baseline is None:
        aggregate_rows = [Row(name, _cells(rows, mean), readout_cells=rows[0].readout_cells) for name, rows in named]
        return table._replace(rows=aggregate_rows + printed, spans=spread_caption(mean))
    if printed:
        raise ConfigError(f"--baseline {baseline}: printed rows have no seeds to differ in; leave --paper away")
    stems = {name.removesuffix(f" ({len(rows)} seeds)"): rows for name, rows in named}
    if baseline not in stems:
        raise ConfigError(f"--baseline {baseline}: {did_you_mean(baseline, stems)}")
    others = stems[baseline]
    aggregate_rows = [
        Row(name, _cells(rows, mean, others), readout_cells=rows[0].readout_cells)
        for name, rows in named
        if rows is not others
    ]
    return table._replace(rows=aggregate_rows, spans=spread_caption(mean, baseline))


def _cells(rows: Sequence[Row], mean: bool, others: Sequence[Row] | None = None) -> list[Cell | None]:
    """A cell for every column: `spread`, or where there are `others` the `difference` to them."""
    cells: list[Cell | None] = []
    for number, column in enumerate(zip(*(row.cells for row in rows), strict=True)):
        baseline_cells = [row.cells[number] for row in others or rows]
        values, baseline_values = (
            [cell.value for cell in side if cell is not None] for side in (column, baseline_cells)
        )
        metrics = {cell.metric for cell in (*column, *baseline_cells) if cell is not None}
        # Of some seeds alone it would be another number of seeds than the row says.
        if len(values) < len(rows) or len(baseline_values) < len(baseline_cells) or len(metrics) > 1:
            cells.append(None)
            continue
        odd = any(cell is not None and cell.odd for cell in (*column, *baseline_cells))
        cells.append(
            Cell(*(spread(values, mean) if others is None else difference(values, baseline_values)), odd, *metrics)
        )
    return cells


def recipe_of(name: str) -> tuple[str, Any]:
    """What a row was trained with and how it was scored, less its seed; and that seed. A checkpoint below its run's folder is the run's."""
    path, bracket, how = name.partition(" (")  # what of it was scored: slots, a limit
    place = Path(path)
    # RUN, RUN/checkpoints/step-…: all are of one run.
    for folder in (place, *place.parents[:2]):
        if (folder / "config.yaml").is_file():
            tree = parse_yaml(read_text(folder / "config.yaml"), str(folder / "config.yaml"))
            if isinstance(tree, dict):
                recipe = _comparable_recipe(tree, str(folder / "config.yaml"))
                return f"{yaml.safe_dump(recipe)}{place.relative_to(folder)}{bracket}{how}", tree.get("seed")
    raise ConfigError(
        f"--seeds: {name} is no run with a config.yaml, which says what it was trained with; leave it away"
    )


def _comparable_recipe(tree: Tree, origin: str) -> Tree:
    """A recipe as this version writes it (what an older one did not know has its default), less its seed and what changes no number."""
    try:
        config = resolve(RunConfig, tree, origin, stored=True)
    except ConfigError:  # of keys that are gone, or of a plug-in that is not here
        return {key: value for key, value in tree.items() if key not in _SEED_DEPENDENT_KEYS}
    # Written out whole: a default that is typed and one that is not are the same recipe.
    recipe = config.model_dump(mode="json")
    for key in ("seed", *resumable_keys(config)):
        block: Any = recipe
        *above, last = key.split(".")
        for part in above:
            block = block.get(part, {})
        block.pop(last, None)
    return recipe


def _name(names: Sequence[str]) -> str:
    """What the names begin with, and how many they are."""
    first = names[0]
    shared = next(i for i in range(len(first) + 1) if i == len(first) or any(n[i : i + 1] != first[i] for n in names))
    # Names of seeds share what stands before the number: emoji-seed0 and emoji-seed1 are emoji.
    stem = first[:shared].rstrip("0123456789").removesuffix("seed").removesuffix("-s").rstrip("-_/. ")
    return f"{stem or first} ({len(names)} seeds)" if len(names) > 1 else first
