"""`sparo slots name` and `search`: names for slots, and images that are alike in some slots."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from sparo_train.core.errors import ConfigError

from .given_options import check_json_path, parse_slots
from .slot_verbs import (
    Checkpoint,
    Data,
    Json,
    Kind,
    Limit,
    Model,
    Parts,
    Root,
    Seed,
    Store,
    make_slot_options,
    refuse_other_units,
)


def name(
    context: typer.Context,
    checkpoint: Checkpoint,
    task: Annotated[
        str,
        typer.Option(
            help="Task (kind retrieval, pairs or zeroshot) whose captions are used to test names. With zeroshot, "
            "the class names are the captions."
        ),
    ],
    vocabulary: Annotated[
        Path | None, typer.Option(help="Text file with one name per line. Default: the words of the captions.")
    ] = None,
    template: Annotated[str, typer.Option(help="Prompt for the text tower; {c} stands for the name.")] = "{c}",
    count: Annotated[int, typer.Option(min=1, max=20, help="Number of names per slot.")] = 3,
    min_images: Annotated[
        int,
        typer.Option(
            min=2,
            help="Test a name only if, in each half of the data, the captions of at least this many images contain it, and those of at least this many do not.",
        ),
    ] = 10,
    replace: Annotated[bool, typer.Option("--replace", help="Replace names that --out already has.")] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Selection file that receives the names; it is created if it does not exist.")
    ] = Path("selection.json"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    seed: Seed = 0,
    json_file: Json = None,
) -> None:
    """Name slots with words of a vocabulary, and test the names on held-out images."""
    from ..commands.slot_naming import NameOptions, name_units

    if units == "heads":
        raise ConfigError("--units heads: this command cannot name heads. Use `slots` or `parts`.")
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: expected a .json file, which --slots can read.")
    refuse_other_units(context, units)
    options = make_slot_options(model, data, root, features, limit, units, parts, 4, "slice")
    name_options = NameOptions(
        task, vocabulary, template, count, min_images, seed, replace, out, check_json_path(json_file)
    )
    name_units(checkpoint, name_options, options)


def search(
    context: typer.Context,
    checkpoint: Checkpoint,
    query: Annotated[str, typer.Argument(help="Path of an image, or a text for the text tower.")],
    slots: Annotated[
        str,
        typer.Option(help="Slots in which the results should be similar to the query: 0,3,8-15, or a selection.json."),
    ],
    index: Annotated[str, typer.Option(help="Task whose images are searched.")],
    different: Annotated[
        float,
        typer.Option(
            min=0,
            help="If the query is an image: factor for the cosine in the slots outside --slots. The product is "
            "subtracted from the score, so that results differ from the query in those slots.",
        ),
    ] = 0.25,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of results.")] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder for report.html, which shows the pictures.")
    ] = None,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    json_file: Json = None,
) -> None:
    """Find images that are like an image or a text in some slots, and different in the others."""
    from ..commands.slot_searching import SearchOptions, search_images

    if units == "heads":
        raise ConfigError("--units heads: this command cannot search heads. Use `slots` or `parts`.")
    refuse_other_units(context, units)
    chosen = parse_slots(slots)
    if not chosen:
        raise ConfigError("--slots: is empty. Give at least one slot, such as 0,3.")
    if not math.isfinite(different):
        raise ConfigError(f"--different: expected a finite number, got {different}")
    options = make_slot_options(model, data, root, features, limit, units, parts, 4, "slice")
    source = context.get_parameter_source("different")
    given_different = None if source is not None and source.name == "DEFAULT" else different
    search_options = SearchOptions(query, chosen, index, given_different, count, out, check_json_path(json_file))
    search_images(checkpoint, search_options, options)
