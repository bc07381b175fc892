"""The `sparo` command. Errors that a user can fix are printed without a traceback and exit with code 2; bugs keep their traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from sparo_train import __version__
from sparo_train.core.errors import ConfigError, SparoError, StoppedError
from sparo_train.core.world import launched_world

from ..views.terminal import out
from . import data, eval, jobs, slot_names, slot_pictures, slot_verbs
from .given_options import ALLOW_UNKNOWN_OPTIONS, Overrides, Recipe, load_run_config, normalize_overrides
from .plain_flags import hide_types_of_flags
from .process import call, leave, share_cores

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Pretraining and understanding structured encoders.",
)
app.add_typer(data.app, name="data")
app.add_typer(jobs.app, name="launch")
app.add_typer(eval.app, name="eval")
for verb in (
    slot_names.name,
    slot_names.search,
    slot_pictures.show,
    slot_pictures.panels,
    slot_pictures.views,
    slot_pictures.edit,
    slot_pictures.explore,
):
    slot_verbs.app.command()(verb)
app.add_typer(slot_verbs.app, name="slots")


def _print_version(value: bool) -> None:
    if value:
        out.print(f"sparo {__version__}")
        raise typer.Exit


@app.callback()
def sparo(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pretraining and understanding structured encoders: CLIP, DINO, slots."""


@app.command(context_settings=ALLOW_UNKNOWN_OPTIONS)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve the recipe and count parameters, memory and data. Train nothing.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Print the resolved recipe with the origin of each value.")
    ] = False,
    exit_code_on_stop: Annotated[
        int,
        typer.Option(
            min=0,
            max=255,
            help="Exit code after a signal stopped the run and everything was saved. For schedulers that restart a "
            "job only after certain codes.",
        ),
    ] = StoppedError.exit_code,
) -> None:
    """Train a recipe. Repeat the command to resume. Exit codes: 0 finished, 75 stopped by a signal and saved."""
    config = load_run_config(
        recipe, overrides
    )  # commands import their dependencies, so that `sparo --help` imports none of it
    if show:
        from sparo_train.core.recipe.layers import origins
        from sparo_train.train.run_config import RunConfig

        from ..recipes import find_recipe
        from ..views.sizes import resolved_lines

        found = origins(find_recipe(recipe), normalize_overrides(overrides), RunConfig)
        chosen = {tuple(choice.key.split(".")): f"auto: {choice.reason}" for choice in config.choices}
        for line in resolved_lines(config, {**chosen, **found}):
            out.print(line, soft_wrap=True)
        return
    if dry_run:
        from evals.interop.initial_weights import refuse_absent_starts
        from evals.suite.task import check_recipe_compatible
        from sparo_train.train.dry_run import dry_run as resolve_sizes

        from ..views.sizes import show_dry

        # Training would refuse the same.
        check_recipe_compatible(config)
        refuse_absent_starts(config.objective, config.start_from)
        show_dry(resolve_sizes(config), config.name, config.batch_size)
        return
    from ..commands.train import exit_if_stopped
    from ..commands.train import train as run

    try:
        exit_if_stopped(run(config))
    except StoppedError as stopped:
        stopped.exit_code = exit_code_on_stop
        raise


@app.command()
def papers(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD",
            help="Words that name a paper, table or figure, as in `sparo papers sparo table 6`. Default: all.",
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Make the data, train, draw the figure, and test the paper's claims.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="With --run: use the small version, made for two CPU cores.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --run: number of seeds. Default: 5 with --small, otherwise as many as in the paper."
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--cluster",
            "--on",
            help="With --run: where the runs are trained, such as local or slurm; see `sparo launch train --help`.",
        ),
    ] = "local",
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --run: maximum number of runs at a time. Default: 1 on this machine, all with SLURM."
        ),
    ] = None,
    claims: Annotated[bool, typer.Option("--claims", help="List the claims with their tests and verdicts.")] = False,
) -> None:
    """List the tables and figures of the five papers with commands, costs and our results, or run one."""
    if claims or not run:
        from ..papers.listing import print_claims, print_papers

        given = {"--small": small, "--seeds": seeds is not None, "--parallel": parallel is not None}
        if unused := next((option for option, value in given.items() if value), None):
            raise ConfigError(f"{unused}: applies to --run only. Remove it, or add --run.")
        print_claims(words or []) if claims else print_papers(words or [])
        return
    from ..jobs.cluster_files import load_cluster
    from ..jobs.launching import LaunchOptions
    from ..papers.index import find_items
    from ..papers.run import run_item

    items = find_items(words or [])
    if len(items) > 1:
        names = ", ".join(item.name for item in items[:4])
        raise ConfigError(
            f"--run: runs one table or figure, but the words in the command match {len(items)} ({names}, …). Add words."
        )
    run_item(items[0], small, seeds, LaunchOptions(on, load_cluster(on), parallel))


@app.command()
def recipes(
    word: Annotated[
        str | None, typer.Argument(help="Show only recipes whose name or description contains this word.")
    ] = None,
) -> None:
    """List the shipped recipes; `sparo train NAME` trains one."""
    from sparo_train.core.errors import ConfigError

    from ..recipes import HARDWARE, shipped_recipes

    matches = [own for own in shipped_recipes() if word is None or word.lower() in f"{own.name} {own.line}".lower()]
    if not matches:
        raise ConfigError(f"{word}: no recipe matches. `sparo recipes` lists all.")
    width = max(len(own.name) for own in matches)
    for heading in (*(heading for _, heading in HARDWARE), "Others"):
        group = [own for own in matches if own.hardware == heading]
        if not group:
            continue
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, min_width=width)
        table.add_column()
        for own in group:
            table.add_row(own.name, Text(own.line, style="dim"))
        out.print(Text(f"{heading}:", style="bold"), table)


@app.command()
def config(
    key: Annotated[str, typer.Argument(help="Key (optim.lr), block (optim), or the end of a key (lr).")] = "",
) -> None:
    """Describe keys of a recipe: type, default, meaning, example."""
    from ..commands.key_tables import describe_key, example, examples, find_keys

    example_by_key = examples() if key else {}
    keys = find_keys(key)
    if len(keys) > 1:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("key", overflow="fold")
        table.add_column("meaning")
        for one in keys:
            table.add_row(f"{one.dotted}" + (f"  [{one.entry_label}]" if one.entry_label else ""), describe_key(one))
        out.print(table)
        return
    one = keys[0]
    out.print(f"{one.dotted}" + (f"  [{one.entry_label}]" if one.entry_label else ""))
    out.print(f"  {describe_key(one)}")
    if written := example(one, example_by_key):
        out.print(f"  example: {written}", soft_wrap=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or one of its checkpoints.")],
    out_path: Annotated[Path | None, typer.Option("--out", help="Output path. Default: RUN/export.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Format. For CLIP: open_clip (a folder that open_clip loads as local-dir:FOLDER) or sparo-clip (a "
            ".pt file). For DINO: dino (a .pth file), timm (a folder) or torch (a .pt2 program that needs only "
            "torch). For both: transformers (a folder) or onnx (a folder with .onnx files)."
        ),
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(help="last:N: export the mean weights of the newest N checkpoints (see checkpoint.keep_last)."),
    ] = None,
    hub: Annotated[
        str | None, typer.Option(help="OWNER/NAME: also upload to this repository of the Hugging Face hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --hub: create the repository as private.")] = False,
) -> None:
    """Export the newest weights of a run for another program, with a model card."""
    from evals.interop.exporting import export_run

    # Before the export, so that a wrong option is reported before half an hour of writing.
    if private and hub is None:
        raise ConfigError("--private: applies to --hub OWNER/NAME only. Remove it.")
    path = export_run(run, out_path, layout, average)
    out.print(str(path), soft_wrap=True)
    if hub is not None:
        from ..commands.hub import upload

        out.print(upload(path, hub, private), soft_wrap=True)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Folder for data, runs and the page. Default: runs/demo or runs/demo_quick.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Run for one minute to check that everything works. The models learn little."),
    ] = False,
) -> None:
    """Render scenes, train CLIP and CLIP+SPARO of equal size, score both, write a page. Takes at most ten minutes on two cores."""
    from ..commands.demo import run_demo

    run_demo(folder or Path("runs/demo_quick" if quick else "runs/demo"), quick)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


hide_types_of_flags(app)


def main() -> None:
    """Entry point of the `sparo` command."""
    share_cores()
    code, error = call(app, sys.argv[1:])
    # Only for a single rank: several ranks have printed their errors already, and Python would print them again.
    if error is not None and not isinstance(error, SparoError) and not launched_world():
        raise error
    leave(code)
