"""`sparo slots show`, `panels`, `views` and `explore`: pictures of slots, and the explorer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

from .given_options import parse_slots, refuse_options
from .slot_verbs import (
    Checkpoint,
    Checkpoints,
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
        typer.Option(
            help="Tasks whose scores are shown. Same syntax as `sparo eval --tasks`. Default: all that the page supports."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task whose images are shown. Default: one with captions.")] = None,
    images: Annotated[
        int | None,
        typer.Option(min=1, max=50_000, help="Number of images, evenly spaced. Default: 500; with --static, 100."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Second checkpoint to compare with. You can also choose it on the page.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Selection file. The page opens this file if it exists, and saves to it.")
    ] = Path("selection.json"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Addresses other than loopback require the printed token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8765,
    token: Annotated[
        bool,
        typer.Option(
            "--token",
            help="Require a token on loopback, too, so that other accounts of this machine cannot open the page.",
        ),
    ] = False,
    static: Annotated[
        Path | None,
        typer.Option(
            help="Write the page and the model to this folder instead of starting a server. If the folder name ends "
            "with .html, write a single file instead."
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="With --static: precision of the model, fp32, fp16 or int8.")] = "fp16",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name under which a proxy or tunnel serves the page, such as hub.example.org. May be repeated. Requires a token."
        ),
    ] = None,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    classifier_slots: Classifier = "slice",
) -> None:
    """Serve a page to look at slots, switch them, watch scores change, name them, and save a selection; or write it with its model."""
    from ..commands.slot_work import split_names
    from ..explorer.serve import PageOptions, write_page
    from ..explorer.serve import explore as serve

    # Before anything is encoded, because a selection must be readable again.
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: expected a .json file, which --slots can read.")
    refuse_other_units(context, units)
    options = make_slot_options(model, data, root, features, limit, units, parts, 4, classifier_slots)
    names = tuple(allow_host or ())
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9.-]+", name):
            raise ConfigError(f"--allow-host: expected a name without scheme, port and path, got {name}.")
    count = images or (500 if static is None else 100)
    page_options = PageOptions(split_names(tasks), task, count, compare, out, host, port, token, names)
    if static is None:
        refuse_options(context, ("precision",), "applies to --static only")
        serve(checkpoint, page_options, options)
        return
    refuse_options(context, ("compare", "host", "port", "token", "allow_host"), "does not apply to --static")
    if precision not in ("fp32", "fp16", "int8"):
        raise ConfigError(f"--precision {precision}: {did_you_mean(precision, ('fp32', 'fp16', 'int8'))}")
    write_page(checkpoint, page_options, options, static, precision)


def show(
    checkpoint: Checkpoint,
    task: Annotated[str | None, typer.Option(help="Task whose images are shown.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Your own image. May be repeated.")] = None,
    caption: Annotated[
        list[str] | None, typer.Option(help="Caption of the --image at the same position. Give one for each --image.")
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(
            help="Show only these slots: numbers such as 0,3,8-15, or a selection.json, whose slot names are shown, too."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images of the task, evenly spaced.")] = 200,
    examples: Annotated[int, typer.Option(min=0, help="Number of images that are shown with all their slots.")] = 8,
    tiles: Annotated[int, typer.Option(min=1, max=64, help="Images per row of a slot's gallery.")] = 6,
    min_cosine: Annotated[
        float,
        typer.Option(
            min=-1,
            max=1,
            help="Show an example of a slot only if the cosine similarity of the slot's image vector and text vector "
            "is above this value.",
        ),
    ] = 0.75,
    min_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Show an image as an example of a slot only if more than this share of the slot's attention goes "
            "to a single word of the caption. If several slots attend to the same word, show only the slot "
            "whose image vector and text vector are most similar.",
        ),
    ] = 0.5,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html and PNG files.")] = Path("slots"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """Draw what slots attend to, as report.html and PNG files."""
    from ..commands.pages.show_runs import ShowOptions, show_slots

    options = make_slot_options(model, data, root, "none", None, "slots", None, 4, "slice")
    slot_ids = parse_slots(slots)
    show_options = ShowOptions(
        task, image or [], caption or [], slot_ids, images, examples, tiles, min_cosine, min_share
    )
    show_slots(checkpoint, show_options, options, out)


def panels(
    checkpoints: Checkpoints,
    task: Annotated[str | None, typer.Option(help="Task whose images are drawn.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Your own image. May be repeated.")] = None,
    images: Annotated[int, typer.Option(min=1, max=64, help="Number of images of the task, evenly spaced.")] = 6,
    tile: Annotated[int, typer.Option(min=16, max=512, help="Width and height of each picture, in pixels.")] = 96,
    uncertain: Annotated[
        bool,
        typer.Option(
            "--uncertain",
            help="Also draw soft masks: the colour of a pixel is the mean of the slots' colours, weighted by each "
            "slot's share of the pixel.",
        ),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Output: a .png file, an animated .webp or .gif (videos only), or a folder, which receives a page "
            "and one picture per sample.",
        ),
    ] = Path("panels.png"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """Draw images with their masks, the reconstruction, and every slot alone.

    Of several runs, such as the seeds of a recipe, the masks of the best and the worst are drawn next to each other.
    """
    from ..views.terminal import out as printed

    if out.suffix.lower() not in ("", ".png", ".webp", ".gif"):
        raise ConfigError(f"--out {out}: expected a .png file; for videos, a .webp or .gif file; for a page, a folder.")
    options = make_slot_options(model, data, root, "none", None, "slots", None, 4, "slice")
    if len(checkpoints) > 1:
        from ..commands.pages.seed_panels import draw_best_and_worst

        if task is None or image or out.suffix.lower() != ".png":
            raise ConfigError(
                "sparo slots panels: with several checkpoints, give --task, set --out to a .png file, and remove --image."
            )
        place = draw_best_and_worst(checkpoints, task, images, tile, out, options, uncertain)
        printed.print(str(place), soft_wrap=True)
        return
    from ..commands.pages.panel_runs import draw_panels

    for path in draw_panels(checkpoints[0], task, image or [], images, tile, out, options, uncertain):
        printed.print(str(path), soft_wrap=True)


def views(
    checkpoint: Checkpoint,
    task: Annotated[str, typer.Option(help="Task whose scenes are shown.")] = "views",
    scenes: Annotated[int, typer.Option(min=1, max=64, help="Number of scenes of the task, evenly spaced.")] = 3,
    tile: Annotated[int, typer.Option(min=16, max=512, help="Width and height of each picture, in pixels.")] = 64,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html and its pictures.")] = Path("scenes"),
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """Draw scenes with several cameras: rendered views, depth, every slot alone, and a turntable."""
    from ..commands.pages.panel_runs import draw_scenes
    from ..views.terminal import out as printed

    options = make_slot_options(None, data, root, "none", None, "slots", None, 4, "slice")
    for path in draw_scenes(checkpoint, task, scenes, tile, out, options):
        printed.print(str(path), soft_wrap=True)


def edit(
    checkpoint: Checkpoint,
    image: Annotated[str, typer.Argument(help="Image file, or TASK:NUMBER for an image of a task, as in masks:0.")],
    slot: Annotated[
        int, typer.Option(min=0, help="Number of the slot to edit, as `sparo slots panels --image FILE` shows it.")
    ],
    move: Annotated[
        str | None,
        typer.Option(
            help="Move the object by dx,dy, as fractions of the image size: 0.25,0 moves it right by a quarter of the width."
        ),
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Factor by which the object's size is multiplied. Needs slots with scales (TS-SA).")
    ] = 1.0,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the slot.")] = False,
    swap: Annotated[
        str | None,
        typer.Option(
            help="`SLOT` swaps the edited slot with slot SLOT of the same image. `IMAGE:SLOT` replaces the edited slot with a slot of another image."
        ),
    ] = None,
    tile: Annotated[int, typer.Option(min=16, max=512, help="Width and height of each picture, in pixels.")] = 128,
    out: Annotated[
        Path, typer.Option("--out", help="Output: a .png file with steps of the edit, or an animated .webp or .gif.")
    ] = Path("edited.png"),
    data: Data = None,
    root: Root = Path("data"),
) -> None:
    """Change a slot (move, scale, delete, swap) and draw the image again."""
    from ..commands.pages.edit_runs import EditOptions, edit_image
    from ..views.terminal import out as printed

    if out.suffix.lower() not in (".png", ".webp", ".gif"):
        raise ConfigError(f"--out {out}: expected a .png, .webp or .gif file.")
    if sum((move is not None or scale != 1.0, delete, swap is not None)) != 1:
        raise ConfigError("sparo slots edit: give only --delete, only --swap, or one or both of --move and --scale.")
    try:
        dx, dy = (0.0, 0.0) if move is None else tuple(float(part) for part in move.split(","))
    except ValueError:
        raise ConfigError(f"--move {move}: expected two numbers, as in 0.25,-0.1") from None
    slot_options = make_slot_options(None, data, root, "none", None, "slots", None, 4, "slice")
    options = EditOptions(image, slot, (dx, dy), scale, delete, swap, tile, out, slot_options)
    printed.print(str(edit_image(checkpoint, options)), soft_wrap=True)
