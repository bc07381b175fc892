"""`sparo eval table`, `sweep`, `compare`, `leaderboard` and `export`: what results look like side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.files import escape_control_chars

from ..views.terminal import out
from .given_options import check_figure_path

if TYPE_CHECKING:
    from evals.report.grid import Grid

Results = Annotated[
    list[str], typer.Argument(help="Run folders, other folders with a results.jsonl, or results.jsonl files.")
]
Mean = Annotated[
    bool,
    typer.Option(
        "--mean",
        help="For several seeds, show the mean with its 95 % interval (Student's t) instead of median and range.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        help="Row to compare with: every other row shows its mean over seeds minus the mean of this row, with a 95 % interval (Welch's t)."
    ),
]


def table(
    results: Results,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Set of columns: `compositional`, `datacomp`, `reviewer`, or the number of a table in the SPARO "
            "paper (1, 2, 3, 6, B.1, B.2). Default: the headline metric of each task."
        ),
    ] = None,
    paper: Annotated[
        str,
        typer.Option(
            help="With --layout: add the paper's rows for these training sets: CC3M, CC12M, CC15M, L400M, ImageNet "
            "or all."
        ),
    ] = "",
    transpose: Annotated[bool, typer.Option(help="One row per task and one column per checkpoint.")] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Mark scores that are significantly better or worse than those of this row (paired test where possible, Holm-corrected)."
        ),
    ] = None,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Combine runs that differ only in their seed: median and range.")
    ] = False,
    mean: Mean = False,
    baseline: Baseline = None,
    format: Annotated[str, typer.Option(help="Output format: terminal, markdown, csv, latex or html.")] = "terminal",
) -> None:
    """Print results as a table of checkpoints and tasks; bold scores are significantly better than all others in the column."""
    from evals.report import paper_tables as layouts
    from evals.report.results_file import read_records

    _refuse_both(mean, baseline)
    if (mean or baseline is not None) and not seeds:
        raise ConfigError(f"{'--mean' if mean else f'--baseline {baseline}'}: needs --seeds. Add it.")
    if reference is not None and seeds:
        raise ConfigError(f"--reference {reference}: compares single runs. For runs of several seeds, use --baseline.")
    grid_kwargs: dict[str, Any] = {"reference": reference}
    if layout == "6":
        from ..commands.sweep_table import checkpoint_readout_cells  # builds models on the meta device

        grid_kwargs["readout_cells_of"] = checkpoint_readout_cells
    grid = layouts.grid(read_records(results), layout, [word for word in paper.split(",") if word], **grid_kwargs)
    if seeds:
        from evals.report.seed_average import over_seeds

        grid = over_seeds(grid, mean, baseline)
    _print(grid, transpose, format)


def sweep(
    file: Annotated[
        Path,
        typer.Argument(
            help="A sweep: its YAML file, its name if it is shipped (such as sweeps/sparo_table6), or the JSON file that --record wrote."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            help="Parent folder of the sweep's runs. Default: the folder in the key `out` of the sweep's recipes.",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Also draw a figure into this file, as described in the sweep file (key `figure`). Without this key: a "
            "score over the number of parameters."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Also write the scores of all runs to this JSON file, from which figures can be drawn again."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="TASK or TASK/METRIC to plot with --figure. Default: the score that is configured for the sweep's "
            "figure, otherwise the first score."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Show the columns of this table of the SPARO paper: 1, 2, 3, 6, B.1 or B.2."),
    ] = None,
    paper: Annotated[
        str,
        typer.Option(
            help="With --layout: add the paper's rows for these training sets (CC15M, …); `all` adds all rows."
        ),
    ] = "",
    mean: Mean = False,
    baseline: Baseline = None,
    format: Annotated[str, typer.Option(help="Output format: terminal, markdown, csv or latex.")] = "terminal",
) -> None:
    """Print the rows of a sweep with parameters, and each task's median and range over the trained seeds."""
    from ..commands.sweep_table import sweep_grid, sweep_rows
    from ..papers.figures import draw
    from ..papers.sweep_record import collect, read_record, write_record
    from ..recipes import find_recipe

    if task is not None and figure is None:
        raise ConfigError(f"--task {task}: applies to --figure only. Remove it, or name a file with --figure.")
    _refuse_both(mean, baseline)
    check_figure_path(figure, "--figure")
    if file.suffix == ".json":
        if figure is None or any((record, layout, paper, baseline, folder)):
            raise ConfigError(
                f"{file}: is a sweep's record, which can only be drawn as a figure. Add --figure, and remove other "
                "options."
            )
        draw(read_record(file), figure, task, True)
        out.print(str(figure), soft_wrap=True)
        return
    file = find_recipe(file)
    rows = sweep_rows(file, folder)
    grid = sweep_grid(file.stem, rows, layout, [word for word in paper.split(",") if word], mean, baseline)
    _print(grid, False, format)
    scores = collect(file, folder) if figure is not None or record is not None else None
    if record is not None and scores is not None:
        write_record(scores, record)
        out.print(str(record), soft_wrap=True)
    if figure is not None and scores is not None:
        # As in the papers, where the sweep describes its figure: means with intervals.
        draw(scores, figure, task, mean or scores.figure is not None)
        out.print(str(figure), soft_wrap=True)


def _refuse_both(mean: bool, baseline: str | None) -> None:
    if mean and baseline is not None:
        raise ConfigError(
            f"--mean, --baseline {baseline}: --baseline already shows differences of means. Remove --mean."
        )


def _print(grid: Grid, transpose: bool, format: str) -> None:
    from evals.report import grid_text

    from ..views.results_table import grid_table
    from ..views.table_page import table_page

    writers: Mapping[str, Callable[[Grid, bool], str]] = {
        "markdown": grid_text.markdown, "csv": grid_text.as_csv, "latex": grid_text.latex, "html": table_page,
    }  # fmt: skip
    if format == "terminal":
        out.print_wide(grid_table(grid, transpose))
        for note in grid.notes:
            out.print(note, soft_wrap=True)
    elif format in writers:
        out.out(escape_control_chars(writers[format](grid, transpose)), end="")
    else:
        raise ConfigError(f"--format {format}: {did_you_mean(format, ['terminal', *writers])}")


def compare(
    first: Annotated[
        str,
        typer.Argument(
            help="First checkpoint: a run folder, a folder whose results.jsonl has one checkpoint only, or 'RUN (slots 0,1)' for "
            "the scores of RUN with slots 0 and 1 only."
        ),
    ],
    second: Annotated[str, typer.Argument(help="Second checkpoint.")],
    plot: Annotated[
        Path | None, typer.Option(help="Also plot relative changes into this file (PNG, PDF or SVG).")
    ] = None,
) -> None:
    """Compare two checkpoints on the same samples.

    Prints paired differences with 95 % intervals, the numbers of samples that only one answers correctly (1st, 2nd), and
    McNemar's exact p.
    """
    from ..commands.comparison import print_comparison

    check_figure_path(plot, "--plot")
    print_comparison(first, second, plot)


def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Folder with scored runs or results.jsonl files, at any depth.")],
    page: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("leaderboard.html"),
    layout: Annotated[
        str | None,
        typer.Option(help="Columns, as in `sparo eval table --layout`. Default: the main metric of each task."),
    ] = None,
) -> None:
    """Write a page with all results below a folder: sortable, with filters by model size and training data, and details of each score."""
    from evals.report.leaderboard import read_leaderboard
    from evals.report.results_file import refuse_unwritable
    from sparo_train.core.files import write_whole

    from ..views.table_page import leaderboard_page

    if page.is_dir():
        raise ConfigError(f"--out {page}: is a folder. Name a file.")
    refuse_unwritable(page.parent, f"--out {page}")
    board = read_leaderboard(folder, layout)
    write_whole(page, leaderboard_page(board))
    out.print(f"wrote {page}: {len(board.entries)} checkpoints, {len(board.table.columns)} columns", soft_wrap=True)


def export_results(
    results: Results,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the JSON files.")],
) -> None:
    """Write results as JSON files of clip-benchmark, for `clip_benchmark build`."""
    from evals.report.grid_text import write
    from evals.report.results_file import read_records

    written = write(read_records(results), folder)
    out.print(f"wrote {len(written)} file(s) to {folder}", soft_wrap=True)
