"""`sparo`: the verbs. Problems that a user can solve are printed in one piece and end with code 2; bugs keep their traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sparo_train import __version__
from sparo_train.core.errors import SparoError
from sparo_train.core.world import started

from ..views.terminal import out
from . import data, eval, explore, jobs, slot_pictures, slot_verbs
from .process import call, leave

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pretraining and understanding structured encoders.",
)
app.add_typer(data.app, name="data")
app.add_typer(jobs.app, name="launch")
app.add_typer(eval.app, name="eval")
for verb in (slot_pictures.show, slot_pictures.panels, explore.explore):
    slot_verbs.app.command()(verb)
app.add_typer(slot_verbs.app, name="slots")

Recipe = Annotated[Path, typer.Argument(help="a YAML recipe, e.g. configs/clip/scenes_tiny.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value …")]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry: Annotated[bool, typer.Option("--dry", help="resolve and count, train nothing")] = False,
) -> None:
    """Train a recipe; the same line again resumes. Exit codes: 0 finished, 75 stopped by a signal and saved."""
    from sparo_train.train.run import load_run  # commands import what they need: `sparo --help` needs none of it

    config = load_run(recipe, overrides)
    if dry:
        from ..views.sizes import show_dry

        show_dry(config)
        return
    from ..runs.train import exit_if_stopped
    from ..runs.train import train as run

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
    from evals.encoders.exporting import export_run

    out.print(str(export_run(run, to, layout)), soft_wrap=True)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="where data, runs and the page go (default: runs/demo, runs/demo_quick)")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a minute, learns little: to see that it works")] = False,
) -> None:
    """Render scenes, train CLIP and CLIP+SPARO of equal size, score both, write a page. At most ten minutes on two cores."""
    from ..runs.demo import run_demo

    run_demo(folder or Path("runs/demo_quick" if quick else "runs/demo"), quick)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


def main() -> None:
    """Entry point of the `sparo` command."""
    code, error = call(app, sys.argv[1:])
    if error is not None and not isinstance(error, SparoError) and not started():
        raise error
    leave(code)
