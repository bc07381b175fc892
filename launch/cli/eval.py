"""`sparo eval`: score checkpoints, print tables and sweeps, compare and export results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sparo_train.core.errors import ConfigError, did_you_mean
from sparo_train.core.files import escape_control_chars

from ..views.terminal import out
from .given_options import check_figure_path, parse_part_or_array, parse_slots
from .plain_flags import Group

if TYPE_CHECKING:
    from evals.report.grid import Grid

Results = Annotated[list[str], typer.Argument(help="Run folders, or folders or files of results.jsonl.")]
Mean = Annotated[
    bool,
    typer.Option(
        "--mean", help="Over seeds, show the mean with its 95 % interval (Student's t) instead of median and range."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(help="Over seeds, show differences to this row with 95 % intervals (Welch's t)."),
]


class _ScoreUnlessNamed(Group):
    """Command group that runs `score` if its first argument is not the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["score", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ScoreUnlessNamed,
    pretty_exceptions_enable=False,
    help="Score checkpoints (`sparo eval CHECKPOINT…` is short for `sparo eval score CHECKPOINT…`), and show results.",
)


@app.command()
def score(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders, checkpoint folders, exports, weight files, open_clip:NAME@FILE, timm:NAME@FILE, "
            "hf:FOLDER, pixels:SIZE."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Comma-separated names of tasks, sets or groups (see --list), or data folders."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Score a list of data sets below --root, with an estimate of the time: compositional, datacomp or reviewer. "
            "Sets that do not exist are skipped."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="YAML with `tasks:`, or a recipe (file or name) with eval.tasks. Default: the tasks of the run."
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Parent folder of the sets of --list.")] = Path("data"),
    listed: Annotated[
        bool, typer.Option("--list", help="List all data sets, their expected files, and whether these exist.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="For weight files: model name, as in gap-ViT-B-16.")] = None,
    precision: Annotated[
        str, typer.Option(help="Precision of the model: fp32, bf16 or fp16. Scores are fp32.")
    ] = "fp32",
    device: Annotated[
        str,
        typer.Option(
            help="Device of the model: auto, cpu, cuda, cuda:1, xpu or mps. auto: a cuda or xpu device, if any."
        ),
    ] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many images per set, evenly spaced.")] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Folder in which computed encodings are stored for reuse, or none. Default: $SPARO_FEATURES or "
            "~/.cache/sparo/features."
        ),
    ] = None,
    storage: Annotated[str, typer.Option(help="Dtype of stored features: fp32 or fp16.")] = "fp32",
    slots: Annotated[
        str | None,
        typer.Option(
            help="Use only these slots of image encodings, counted from 0: 0,3,8-15, or a selection.json. Texts "
            "keep all slots."
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="I/N, or slurm (from the array): encode share I of N. Scores are computed once all shares exist."
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl and predictions. Default for runs: RUN/evals.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all results to this file.")] = None,
    write_to_run: Annotated[bool, typer.Option(help="Write results into the evals folder of a run.")] = True,
) -> None:
    """Score checkpoints and print one table. Under torchrun, ranks share the encoding, the k-NN search and DINO's probe."""
    if listed:
        from ..views.results_table import show_catalogue

        show_catalogue(root)
        return
    if not checkpoints:
        raise ConfigError("sparo eval: no checkpoint. Name one, or use --list to see the data sets.")
    from evals.report.results_file import refuse_unwritable
    from evals.suite.evaluate import EvalOptions, features_folder
    from sparo_train.core.accelerator import find_device

    from ..commands.score import find_tasks, score_checkpoints

    for key, value, choices in (
        ("precision", precision, ("fp32", "bf16", "fp16")),
        ("storage", storage, ("fp32", "fp16")),
    ):
        if value not in choices:
            raise ConfigError(f"--{key} {value}: {did_you_mean(value, choices)}")
    folder = features_folder() if features is None else None if features == "none" else Path(features)
    if features not in (None, "none"):
        refuse_unwritable(Path(features), "--features")
    eval_options = EvalOptions(
        model=model,
        features=folder,
        storage=cast(Any, storage),  # validated just above
        precision=cast(Any, precision),
        device=str(find_device(device, "--device")),
        limit=limit,
        results=results,
        part=parse_part_or_array(part, folder),
        write_to_run=write_to_run,
        slots=parse_slots(slots),
    )
    tasks_by_checkpoint = find_tasks(checkpoints, tasks, suite, data, root)
    score_checkpoints(checkpoints, tasks_by_checkpoint, eval_options, json_file, suite)


@app.command()
def table(
    results: Results,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Columns: compositional, datacomp, reviewer, or those of a table of the SPARO paper (1, 2, 3, 6, B.1, B.2). Default: "
            "the headline metric of each task."
        ),
    ] = None,
    paper: Annotated[
        str,
        typer.Option(
            help="With --layout: add rows of the paper for these training sets (CC3M, CC12M, CC15M, L400M, "
            "ImageNet), or all."
        ),
    ] = "",
    transpose: Annotated[bool, typer.Option(help="One row per task and one column per checkpoint.")] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Mark scores that are significantly better or worse than those of this row (paired where possible, Holm-corrected)."
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


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file, such as configs/sweeps/table6.yaml.")],
    folder: Annotated[
        Path | None,
        typer.Option("--runs", help="Parent folder of the runs of the sweep. Default: the key `out` of its recipes."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Also plot the score of a task against the number of parameters, and write the plot to this file."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task of --figure. Default: the first.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Show the columns of this table of the SPARO paper: 1, 2, 3, 6, B.1 or B.2."),
    ] = None,
    paper: Annotated[
        str, typer.Option(help="With --layout: add rows of the paper for these training sets (CC15M, …), or all.")
    ] = "",
    mean: Mean = False,
    baseline: Baseline = None,
    format: Annotated[str, typer.Option(help="Output format: terminal, markdown, csv or latex.")] = "terminal",
) -> None:
    """Print the rows of a sweep with parameters, and each task's median and range over the trained seeds."""
    from ..commands.sweep_table import draw, sweep_grid, sweep_rows

    if task is not None and figure is None:
        raise ConfigError(f"--task {task}: applies to --figure only. Remove it, or name a file with --figure.")
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


@app.command()
def compare(
    first: Annotated[
        str, typer.Argument(help="Run folder, folder with results.jsonl of one checkpoint, or 'RUN (slots 0,1)'.")
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


@app.command()
def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Folder with scored runs or results.jsonl files, at any depth.")],
    page: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("leaderboard.html"),
    layout: Annotated[
        str | None, typer.Option(help="Columns, as in `sparo eval table --layout`. Default: the headline of each task.")
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
    out.print(f"{page}: {len(board.entries)} checkpoints, {len(board.table.columns)} columns", soft_wrap=True)


@app.command("export")
def export_results(
    results: Results,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the JSON files.")],
) -> None:
    """Write results as JSON files of clip-benchmark, for `clip_benchmark build`."""
    from evals.report.grid_text import write
    from evals.report.results_file import read_records

    written = write(read_records(results), folder)
    out.print(f"{len(written)} file(s) in {folder}", soft_wrap=True)
