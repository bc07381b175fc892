"""`sparo eval sweep`: the rows of a sweep file with parameters and scores, over seeds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evals.encoders.loading import read_recipe
from evals.report.grid import Cell, Column, Grid, Row
from evals.report.paper_tables import (
    HEADS,
    LAYOUTS,
    TITLES,
    UNKNOWN_READOUT,
    describe_different_data,
    find_columns,
    odd_notes,
    paper_rows,
    readout_cells,
)
from evals.report.results_file import Record, whole_records
from evals.report.seed_average import difference, split_seed, spread, spread_caption
from evals.report.significance import mark_separated_best
from sparo_train.core.errors import ConfigError, DataError, SparoError, did_you_mean
from sparo_train.train.build import num_trained_parameters
from sparo_train.train.run_config import RunConfig

from ..jobs.sweep import expand, read_sweep

logger = logging.getLogger(__name__)


class SweepRow(NamedTuple):
    """A row of a sweep.

    Attributes:
        name: in the file.
        parameters: trained ones.
        folders: of its scored runs, which differ in their seed.
        results: of its runs, by task.
        readout_cells: columns of Table 6 for its readout.
    """

    name: str
    parameters: int
    folders: tuple[Path, ...]
    results: dict[str, list[Record]]
    readout_cells: tuple[str, ...] = ()

    def values(self, task: str, metric: str | None = None) -> tuple[str, list[float]]:
        """Return a metric (default: the headline) and its values in all runs; none if a run lacks it."""
        # A median over other seeds than the row's other values would not be comparable.
        results = [record.result for record in self.results.get(task, [])]
        name = metric or (results[0].headline if results else "")
        values = [result.metrics[name] for result in results if name in result.metrics]
        return name, [] if len(values) < len(self.folders) else values

    def cell(
        self, task: str, metric: str | None = None, mean: bool = False, baseline: SweepRow | None = None
    ) -> Cell | None:
        """Return `spread` over the runs, or the `difference` to another row; None without values."""
        name, values = self.values(task, metric)
        other, others = baseline.values(task, name) if baseline is not None else (name, values)
        if not values or not others or other != name:
            return None
        odd = any(record.result.odd() for row in (self, baseline or self) for record in row.results.get(task, []))
        return Cell(*(spread(values, mean) if baseline is None else difference(values, others)), odd, name)


def sweep_rows(sweep: Path, out: Path | None = None) -> list[SweepRow]:
    """Return the rows of a sweep file; runs are NAME and NAME-seedS in `out` (default: the recipes' folders).

    Raises:
        ConfigError: not a sweep file, or a folder with a row's name that is not one of its runs.
    """
    read_sweep(sweep)
    stem, configs = expand(sweep, [])
    rows = []
    for config in configs:
        place = out or Path(config.out)
        folders = [place / config.name, *sorted(place.glob(f"{config.name}-seed[0-9]*"))]
        folders = [folder for folder in folders if (folder / "config.yaml").is_file()]
        parameters = num_trained_parameters(config)
        # Runs without scores do not count: n is the number of scores, not of folders.
        records_by_folder = {folder: records for folder in folders if (records := _records(folder))}
        _refuse_mismatched_runs(config, list(records_by_folder))
        results: dict[str, list[Record]] = {}
        for record in itertools.chain(*records_by_folder.values()):
            results.setdefault(record.task, []).append(record)
        name, cells = config.name.removeprefix(f"{stem}-"), readout_cells(config.objective, parameters)
        rows.append(SweepRow(name, parameters, tuple(records_by_folder), results, cells))
    return rows


def checkpoint_readout_cells(name: str) -> tuple[str, ...]:
    """Return the same by the name under which a checkpoint was scored; dashes if its recipe is not available."""
    try:
        config = read_recipe(Path(name.partition(" (")[0]))
        return readout_cells(config.objective, num_trained_parameters(config))
    # Not a run; or of a version whose keys are gone, or a plug-in or file that is not here: its score is still shown.
    except SparoError:
        return UNKNOWN_READOUT


def _different_keys(recorded: RunConfig, config: RunConfig) -> list[str]:
    """Return the keys of length, batch and optimizer in which a run differs from a row of the sweep."""
    if config.auto != "off":  # chosen on the machine that trained
        return []
    names = ("steps", "epochs", "samples", "batch_size", "start_from")
    keys = [name for name in names if getattr(recorded, name) != getattr(config, name)]
    before, now = (recipe.optim.model_dump(mode="json") for recipe in (recorded, config))
    return keys + [f"optim.{key}" for key in {**before, **now} if before.get(key) != now.get(key)]


def _refuse_mismatched_runs(config: RunConfig, folders: Sequence[Path]) -> None:
    """Raise `ConfigError` if a folder with a row's name contains another model, or two differ in more than their seeds."""
    runs_by_seed: dict[Any, tuple[str, Path]] = {}
    for folder in folders:
        recorded = read_recipe(folder)
        if other_keys := _different_keys(recorded, config):
            logger.warning(
                f"{folder}: was trained with values that differ from the sweep file in these keys: {', '.join(other_keys)}"
            )
        if recorded.objective != config.objective:
            raise ConfigError(
                f"{folder}: is named like a row of the sweep but has another objective. Move it, or set --runs to the folder that contains the sweep's runs."
            )
        recipe, seed = split_seed(str(folder))
        other, where = next(iter(runs_by_seed.values()), (recipe, folder))
        if seed in runs_by_seed or other != recipe:
            why = "have the same seed" if seed in runs_by_seed else "differ in more than their seed"
            raise ConfigError(
                f"{runs_by_seed[seed][1] if seed in runs_by_seed else where} and {folder} {why}. Move one of them to another folder."
            )
        runs_by_seed[seed] = recipe, folder


def _records(folder: Path) -> list[Record]:
    try:
        return whole_records(folder)  # anything else is not another seed
    except DataError:
        return []  # running, or not scored


def sweep_grid(
    title: str,
    rows: Sequence[SweepRow],
    layout: str | None = None,
    paper: Sequence[str] = (),
    mean: bool = False,
    baseline: str | None = None,
) -> Grid:
    """Return a table of every task's headline, or in a layout of the paper, followed by its printed rows of training sets (`paper`).

    Cells are medians and ranges over seeds, or means and their intervals (`mean`), or differences to the row
    `baseline`.

    Raises:
        DataError: nothing was scored.
        ConfigError: no such layout or row, or printed rows without a layout or together with differences.
    """
    if baseline is not None and paper:
        raise ConfigError(
            f"--baseline {baseline}: a comparison with a baseline needs seeds, and rows of the paper have none. Remove --paper."
        )
    if baseline is not None and baseline not in (names := [row.name for row in rows]):
        raise ConfigError(f"--baseline {baseline}: {did_you_mean(baseline, names)}")
    baseline_row = next((row for row in rows if row.name == baseline), None)
    if layout is None and paper:
        raise ConfigError(
            f"--paper {','.join(paper)}: the paper's rows can only be shown with a --layout, one of {', '.join(LAYOUTS)}"
        )
    columns = find_columns(layout) if layout is not None else []
    tasks = list(dict.fromkeys(task for row in rows for task in row.results))
    if not tasks:
        raise DataError(
            f"{title}: has no scored runs. If the runs are in another folder, name that folder with --runs. "
            "Otherwise train the runs with `sparo launch train` and, if their recipe has no eval.tasks, score them "
            "afterwards with `sparo eval RUN --tasks NAMES`."
        )
    if layout is not None and not {column.task for column in columns} & set(tasks):
        raise DataError(
            f"--layout {layout}: needs scores for one of the tasks "
            f"{', '.join(dict.fromkeys(c.task for c in columns))}, got {', '.join(tasks)}. Score a task that this "
            "layout needs, or remove --layout."
        )
    columns = columns or [Column("", task, task, None) for task in tasks]
    heads = HEADS if layout == "6" else ()
    grid_rows = [
        Row(
            f"{row.name} ({row.parameters / 1e6:.2f} M, n {len(row.folders)})",
            [row.cell(c.task, c.metric, mean, baseline_row) for c in columns],
            readout_cells=row.readout_cells if heads else (),
        )
        for row in rows
        if row is not baseline_row
    ]
    grid_rows += paper_rows(layout, paper) if layout is not None else []
    note = "M: trained parameters; n: scored runs, which differ in their seed"
    mixed_data_notes = {
        t: warning
        for t in tasks
        if (warning := describe_different_data([r for row in rows for r in row.results.get(t, [])]))
    }
    column_tasks = dict.fromkeys(column.task for column in columns)  # in the same order at every start
    odd = [(r.checkpoint, t, r.result.odd()) for row in rows for t in column_tasks for r in row.results.get(t, [])]
    notes = [note, *odd_notes(odd), *mixed_data_notes.values()]
    title = TITLES.get(layout or "", title)
    found = Grid(
        title, columns, grid_rows, notes, spread_caption(mean, baseline or ""), frozenset(mixed_data_notes), heads
    )
    # Differences to a baseline are not ranked.
    return found if baseline else mark_separated_best(found)
