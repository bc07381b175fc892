"""`sparo slots show`, `sparo slots panels` and `sparo slots views`: slots as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparo_train.core.errors import ConfigError

from .given_options import parse_slots
from .slot_verbs import (
    Checkpoint,
    Classifier,
    Data,
    Kind,
    Limit,
    Model,
    Parts,
    Root,
    Store,
    make_slot_options,
    refuse_other_units,
)


def explore(
    context: typer.Context,
    checkpoint: Checkpoint,
    tasks: Annotated[
        str | None,
        typer.Option(help="whose scores are shown, as `sparo eval --tasks` takes them (default: all that fit)"),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="the task whose images are shown (default: one with captions)")
    ] = None,
    images: Annotated[int, typer.Option(min=1, max=5000, help="so many of them, evenly spaced")] = 500,
    compare: Annotated[
        str | None, typer.Option(help="a second checkpoint beside it; the page can open one, too")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="the selection that the page saves, and begins with where it is there")
    ] = Path("selection.json"),
    host: Annotated[
        str, typer.Option(help="where to listen; other than loopback needs the token that is printed")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free")] = 8765,
    token: Annotated[
        bool, typer.Option("--token", help="on loopback, too: other accounts of this machine cannot open it")
    ] = False,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    classifier_slots: Classifier = "slice",
) -> None:
    """A page on this machine: look at slots on images and captions, switch them, see scores move, name them, save the choice."""
    from ..commands.slot_work import split_names
    from ..explorer.serve import PageOptions
    from ..explorer.serve import explore as serve

    # Before anything is encoded: what cannot be read again is no place for a choice.
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: name a .json file, by which --slots knows it")
    refuse_other_units(context, units)
    options = make_slot_options(model, data, root, features, limit, units, parts, 4, classifier_slots)
    serve(checkpoint, PageOptions(split_names(tasks), task, images, compare, out, host, port, token), options)


def show(
    checkpoint: Checkpoint,
    task: Annotated[str | None, typer.Option(help="the task whose images are shown")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="an image of your own; may be given several times")] = None,
    caption: Annotated[list[str] | None, typer.Option(help="its caption, one per --image")] = None,
    slots: Annotated[str | None, typer.Option(help="these alone: 0,3,8-15, or a selection.json with its names")] = None,
    images: Annotated[int, typer.Option(min=1, help="images of the task that are looked at, evenly spaced")] = 200,
    examples: Annotated[int, typer.Option(min=0, help="images that are shown with all their slots")] = 8,
    tiles: Annotated[int, typer.Option(min=1, max=64, help="images per row of a slot's gallery")] = 6,
    min_cosine: Annotated[
        float, typer.Option(min=-1, max=1, help="of a slot's image and text: shown above this")
    ] = 0.75,
    min_share: Annotated[
        float, typer.Option(min=0, max=1, help="of text attention on one word: shown above this")
    ] = 0.5,
    out: Annotated[Path, typer.Option("--out", help="folder for report.html and PNGs")] = Path("slots"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """Pictures of what slots look at: report.html, which needs no other file, and PNGs of its parts."""
    from ..commands.pages.show_runs import ShowOptions, show_slots

    options = make_slot_options(model, data, root, "none", None, "slots", None, 4, "slice")
    slot_ids = parse_slots(slots)
    show_options = ShowOptions(
        task, image or [], caption or [], slot_ids, images, examples, tiles, min_cosine, min_share
    )
    show_slots(checkpoint, show_options, options, out)


def panels(
    checkpoint: Checkpoint,
    task: Annotated[str | None, typer.Option(help="the task whose images are drawn")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="an image of your own; may be given several times")] = None,
    images: Annotated[int, typer.Option(min=1, max=64, help="images of the task, evenly spaced")] = 6,
    tile: Annotated[int, typer.Option(min=16, max=512, help="pixels per side of each picture")] = 96,
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="the PNG; of videos also .webp or .gif, which move; a folder: a page with a picture of each"
        ),
    ] = Path("panels.png"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """A picture of a slot model: per image, or frame, the true masks, its own, what it draws, and every slot alone."""
    from ..commands.pages.panel_runs import draw_panels
    from ..views.terminal import out as printed

    if out.suffix.lower() not in ("", ".png", ".webp", ".gif"):
        raise ConfigError(f"--out {out}: name a .png file, of videos also .webp or .gif, or a folder for a page")
    options = make_slot_options(model, data, root, "none", None, "slots", None, 4, "slice")
    for path in draw_panels(checkpoint, task, image or [], images, tile, out, options):
        printed.print(str(path), soft_wrap=True)


def views(
    checkpoint: Checkpoint,
    task: Annotated[str, typer.Option(help="the task whose scenes are drawn")] = "views",
    scenes: Annotated[int, typer.Option(min=1, max=64, help="scenes of the task, evenly spaced")] = 3,
    tile: Annotated[int, typer.Option(min=16, max=512, help="pixels per side of each picture")] = 64,
    out: Annotated[Path, typer.Option("--out", help="folder for report.html and its pictures")] = Path("scenes"),
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """A page of posed scenes: every view as it is drawn, held out or shown, depth, every slot alone, and a turn around each scene."""
    from ..commands.pages.panel_runs import draw_scenes
    from ..views.terminal import out as printed

    options = make_slot_options(None, data, root, "none", None, "slots", None, 4, "slice")
    for path in draw_scenes(checkpoint, task, scenes, tile, out, options):
        printed.print(str(path), soft_wrap=True)
