"""`sparo`: the verbs. Problems that a user can solve are printed in one piece and end with code 2; bugs keep their traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from sparo_train import __version__
from sparo_train.core.distributed import started
from sparo_train.core.errors import SparoError, StoppedError
from sparo_train.train.run import load_run

from . import data_cli, eval_cli, launch_cli
from .view import console, out

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pretraining and understanding structured encoders.",
)
app.add_typer(data_cli.app, name="data")
app.add_typer(launch_cli.app, name="launch")
app.add_typer(eval_cli.app, name="eval")

Recipe = Annotated[Path, typer.Argument(help="a YAML recipe, e.g. configs/clip/scenes_tiny.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value …")]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry: Annotated[bool, typer.Option("--dry", help="resolve and count, train nothing")] = False,
) -> None:
    """Train a recipe; the same line again resumes. Exit codes: 0 finished, 75 stopped by a signal and saved."""
    config = load_run(recipe, overrides)
    if dry:
        from .dry_view import show_dry  # torch's meta model and the shard index: only where they are used

        show_dry(config)
        return
    from .training import exit_if_stopped
    from .training import train as run

    exit_if_stopped(run(config))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run folder or one of its checkpoints")],
    to: Annotated[Path | None, typer.Option(help="where to (default: RUN/export)")] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="open_clip (a local-dir: folder) or sparo-clip (one .pt file); dino (one .pth file) for DINO runs"
        ),
    ] = None,
) -> None:
    """Write a run's newest weights for open_clip, the sparo-clip repository, or the official DINO code."""
    from .exporting import export_run

    out.print(str(export_run(run, to, layout)), highlight=False, soft_wrap=True)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="where data, runs and the page go (default: runs/demo, runs/demo_quick)")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a minute, learns little: to see that it works")] = False,
) -> None:
    """Render scenes, train CLIP and CLIP+SPARO of equal size, score both, write a page. At most ten minutes on two cores."""
    from .demo import run_demo

    run_demo(folder or Path("runs/demo_quick" if quick else "runs/demo"), quick)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


def main() -> None:
    """Entry point of the `sparo` command."""
    code, error = call(sys.argv[1:])
    if error is not None and not isinstance(error, SparoError) and not started():
        raise error
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process."""
    if started():  # gloo's threads may outlive the interpreter and abort it; nothing is left to be done
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)
    sys.exit(code)


def call(arguments: Sequence[str]) -> tuple[int, Exception | None]:
    """`sparo ARGUMENTS` in this process: its exit code, and the error that it ended with; what a user can solve is printed."""
    try:
        app(list(arguments))
    except StoppedError as stopped:
        if not stopped.repeated:
            console.print(str(stopped), highlight=False)
        return stopped.exit_code, stopped
    except SparoError as error:
        if not error.repeated:
            console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return error.exit_code, error
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), None
    except Exception as error:
        if started():
            traceback.print_exc()
        return 1, error
    return 0, None


if __name__ == "__main__":
    main()
