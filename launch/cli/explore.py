"""`sparo slots explore`: the page on which a person looks at slots and chooses among them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparo_train.core.errors import ConfigError

from .slot_words import (
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
