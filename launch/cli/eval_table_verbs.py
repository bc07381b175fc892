"""`sparo eval table`, `sparo eval sweep`: what was scored, as tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.untrusted import escape_control_chars

from ..views.terminal import out
from .given_options import check_figure_path

if TYPE_CHECKING:
    from evals.report.paper_tables import Grid

Results = Annotated[list[str], typer.Argument(help="run folders, folders with results.jsonl, or such files")]
Mean = Annotated[
    bool, typer.Option("--mean", help="over seeds: the mean and its 95 % interval (Student's t), not median and range")
]
Baseline = Annotated[
    str | None,
    typer.Option(help="over seeds: the differences to this row, with 95 % intervals (Welch's t)"),
]


def table(
    results: Results,
    layout: Annotated[
        str | None, typer.Option(help="1, 2, 3, 6, B.1 or B.2: columns as in the SPARO paper (default: every headline)")
    ] = None,
    paper: Annotated[
        str,
        typer.Option(
            help="with a layout: training sets whose printed rows are added (CC3M, CC12M, CC15M, L400M, ImageNet), or all"
        ),
    ] = "",
    transpose: Annotated[
        bool, typer.Option(help="a row per task and a column per checkpoint (and per printed row of the paper)")
    ] = False,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="one row for runs that differ in their seed alone: median and range")
    ] = False,
    mean: Mean = False,
    baseline: Baseline = None,
    format: Annotated[str, typer.Option(help="terminal, markdown, csv or latex")] = "terminal",
) -> None:
    """One table of results: checkpoints x tasks, or a table of the paper."""
    from evals.report import paper_tables as layouts
    from evals.report.results_file import read_records

    _refuse_both(mean, baseline)
    if (mean or baseline is not None) and not seeds:
        raise ConfigError(f"{'--mean' if mean else f'--baseline {baseline}'}: is over seeds; add --seeds")
    grid_kwargs = {}
    if layout == "6":
        from ..commands.sweep_table import checkpoint_readout_cells  # builds models, if only on paper

        grid_kwargs = {"readout_cells_of": checkpoint_readout_cells}
    grid = layouts.grid(read_records(results), layout, [word for word in paper.split(",") if word], **grid_kwargs)
    if seeds:
        from evals.report.seed_average import over_seeds

        grid = over_seeds(grid, mean, baseline)
    _print(grid, transpose, format)


def sweep(
    file: Annotated[Path, typer.Argument(help="a sweep file, as configs/sweeps/table6.yaml")],
    folder: Annotated[
        Path | None, typer.Option("--runs", help="where its runs are (default: where its recipes put them)")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="also draw a task over parameters into this picture")] = None,
    task: Annotated[str | None, typer.Option(help="of --figure (default: the first)")] = None,
    layout: Annotated[
        str | None, typer.Option(help="6 or B.2 (or another of `sparo eval table`): columns as in the SPARO paper")
    ] = None,
    paper: Annotated[
        str, typer.Option(help="with a layout: training sets whose printed rows are added (CC15M, …), or all")
    ] = "",
    mean: Mean = False,
    baseline: Baseline = None,
    format: Annotated[str, typer.Option(help="terminal, markdown, csv or latex")] = "terminal",
) -> None:
    """The rows of a sweep file: parameters, and each task's median and range over the seeds that were trained."""
    from ..commands.sweep_table import draw, sweep_grid, sweep_rows

    if task is not None and figure is None:
        raise ConfigError(f"--task {task}: is of --figure, which draws it; leave it away, or name a file")
    _refuse_both(mean, baseline)
    check_figure_path(figure, "--figure")
    rows = sweep_rows(file, folder)
    grid = sweep_grid(file.stem, rows, layout, [word for word in paper.split(",") if word], mean, baseline)
    _print(grid, False, format)
    if figure is not None:
        scored = (c.task for c in grid.columns if any(row.cell(c.task) is not None for row in rows))
        draw(rows, task or next(scored, grid.columns[0].task), figure, mean)
        out.print(str(figure), soft_wrap=True)


def _refuse_both(mean: bool, baseline: str | None) -> None:
    if mean and baseline is not None:
        raise ConfigError(f"--mean, --baseline {baseline}: differences are of means; leave --mean away")


def _print(grid: Grid, transpose: bool, format: str) -> None:
    from evals.report import grid_text

    from ..views.eval_tables import grid_table

    writers: Mapping[str, Callable[[Grid, bool], str]] = {
        "markdown": grid_text.markdown, "csv": grid_text.as_csv, "latex": grid_text.latex,
    }  # fmt: skip
    if format == "terminal":
        out.print(grid_table(grid, transpose))
        for note in grid.notes:
            out.print(note, soft_wrap=True)
    elif format in writers:
        out.out(escape_control_chars(writers[format](grid, transpose)), end="")
    else:
        raise ConfigError(f"--format {format}: {did_you_mean(format, ['terminal', *writers])}")
