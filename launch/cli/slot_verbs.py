"""`sparo slots`: scores of single slots, selections, masks, Tables 4 and 5 of the paper, and quality measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

from .given_options import check_figure_path, check_json_path, parse_granularity, parse_k, parse_slots, refuse_options

Checkpoint = Annotated[str, typer.Argument(help="Anything that `sparo eval` accepts.")]
Checkpoints = Annotated[list[str], typer.Argument(help="Anything that `sparo eval` accepts.")]
Model = Annotated[str | None, typer.Option(help="Name of the model in a weight file, as in `sparo eval --model`.")]
Data = Annotated[
    Path | None, typer.Option(help="YAML file with a key `tasks`, or a recipe. Default: eval.tasks of the run.")
]
Root = Annotated[Path, typer.Option(help="Folder that contains the data sets listed by `sparo eval --list`.")]
Store = Annotated[
    str | None,
    typer.Option(
        "--features",
        help="Folder in which computed encodings are stored for reuse, or `none`. Default: $SPARO_FEATURES or ~/.cache/sparo/features.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only this many images per set, evenly spaced.")]
Kind = Annotated[
    str,
    typer.Option(
        "--units",
        help="Units that are scored and selected: slots, parts (equal parts of any encoding, see --parts), or "
        "heads (attention heads of an open_clip ViT).",
    ),
]
Parts = Annotated[int | None, typer.Option(min=2, help="With --units parts: number of equal parts per encoding.")]
Layers = Annotated[
    int, typer.Option("--head-layers", min=1, help="With --units heads: number of last blocks whose heads are used.")
]
Classifier = Annotated[
    str,
    typer.Option(
        "--classifier-slots",
        help="How slots of class vectors are scaled. A class vector is the mean over the class's prompts, so its "
        "slots have different norms. slice: keep these norms. renorm: give all slots the same norm.",
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Random seed for splitting the images into halves, and for random orders of units.")
]
Draws = Annotated[int, typer.Option(min=1, max=10_000, help="Number of random selections to compare with.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write all numbers to this file.")]
K = Annotated[
    str,
    typer.Option(
        "--k",
        help="How many units to select: a number, `half`, or `best` (the number with the best score on the selection data).",
    ),
]


def refuse_other_units(context: typer.Context, units: str) -> None:
    """Raise `ConfigError` for options of units other than the requested ones."""
    for name, kind in (("parts", "parts"), ("head_layers", "heads")):
        if units != kind:
            refuse_options(context, (name,), f"applies to --units {kind} only")


def make_slot_options(
    model: str | None, data: Path | None, root: Path, features: str | None, limit: int | None,
    units: str, parts: int | None, head_layers: int, classifier_slots: str,
) -> Any:  # fmt: skip
    """Return the shared options for `launch.commands.slot_work`."""
    from evals.report.results_file import refuse_unwritable
    from evals.suite.eval_options import features_folder

    from ..commands.slot_work import SlotOptions
    from ..recipes import find_recipe

    folder = features_folder() if features is None else None if features == "none" else Path(features)
    if features not in (None, "none"):
        refuse_unwritable(Path(features), "--features")
    recipe = find_recipe(data) if data else None
    return SlotOptions(model, recipe, root, folder, limit, units, parts, head_layers, classifier_slots)


_SUPPORTED_TASKS = "Default: all tasks of the run (with --data: of that file) whose kind is zeroshot, knn, pairs, choice, matching or paraphrases."
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Score, select, mask and draw the slots of a checkpoint.",
)


@app.command()
def score(
    context: typer.Context,
    checkpoint: Checkpoint,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks that are scored, as in `sparo eval --tasks`. " + _SUPPORTED_TASKS),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="Sort slots by their score on this task. Default: by slot number.")
    ] = None,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    head_layers: Layers = 4,
    classifier_slots: Classifier = "slice",
    json_file: Json = None,
) -> None:
    """Score each unit alone, and all other units without it."""
    from ..commands.slot_runs import score_units
    from ..commands.slot_work import split_names

    refuse_other_units(context, units)
    options = make_slot_options(model, data, root, features, limit, units, parts, head_layers, classifier_slots)
    score_units(checkpoint, split_names(tasks), sort, options, check_json_path(json_file))


@app.command()
def select(
    context: typer.Context,
    checkpoint: Checkpoint,
    task: Annotated[str, typer.Option(help="Task on which units are selected.")],
    report_tasks: Annotated[
        str | None,
        typer.Option(help="Tasks on which the selection is scored. " + _SUPPORTED_TASKS),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="top: slots that score best alone, as in the paper; forward: add one slot at a time; backward: "
            "remove one slot at a time; cover: greedy set cover; bottom, random: baselines for comparison."
        ),
    ] = "top",
    k: K = "half",
    slots: Annotated[
        str | None, typer.Option(help="Slots selected by hand: 0,3,8-15, or a selection.json. Replaces --method.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out/--same-data", help="Select on one half of the images and report on the other.")
    ] = True,
    out: Annotated[Path, typer.Option("--out", help="Output file of the selection.")] = Path("selection.json"),
    plot: Annotated[Path | None, typer.Option(help="Also plot the curves into this file (PNG, PDF or SVG).")] = None,
    seed: Seed = 0,
    draws: Draws = 50,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    head_layers: Layers = 4,
    classifier_slots: Classifier = "slice",
    json_file: Json = None,
) -> None:
    """Select units on one task, write selection.json, and report scores of the selection, of random and of the worst units."""
    from evals.slots.selection_report import ChoiceOptions

    from ..commands.slot_runs import SelectOptions, select_units
    from ..commands.slot_work import split_names

    methods = ("top", "forward", "backward", "cover", "bottom", "random")
    if method not in methods:
        raise ConfigError(f"--method {method}: {did_you_mean(method, methods)}")
    check_figure_path(plot, "--plot")
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: expected a .json file, which --slots can read.")
    refuse_other_units(context, units)
    if slots is not None:
        refuse_options(context, ("method", "k"), "has no effect with --slots, which is a selection already")
    options = make_slot_options(model, data, root, features, limit, units, parts, head_layers, classifier_slots)
    select_options = SelectOptions(
        task, split_names(report_tasks), parse_slots(slots), out, plot, check_json_path(json_file)
    )
    select_units(checkpoint, select_options, ChoiceOptions(method, parse_k(k), held_out, seed, draws), options)


@app.command()
def mask(
    context: typer.Context,
    checkpoint: Checkpoint,
    task: Annotated[
        str, typer.Option(help="Task whose examples train the mask. Its kind must be `pairs`.")
    ] = "sugar_crepe",
    report_tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of kind zeroshot on which the mask is scored. Default: all zeroshot tasks of the run. With "
            "--data: all zeroshot tasks of the file given there."
        ),
    ] = None,
    granularity: Annotated[
        str, typer.Option(help="unit: one weight per slot or part; dimension: one weight per dimension of an encoding.")
    ] = "unit",
    clamp: Annotated[
        str,
        typer.Option(
            help="Limit of the logit scale exp(alpha), where alpha is trained. max: max(exp(alpha), 100), as in the paper's "
            "formula; min: min(exp(alpha), 100), as in CLIP."
        ),
    ] = "max",
    epochs: Annotated[int, typer.Option(min=1, max=100_000, help="Number of epochs to train each mask.")] = 100,
    last_epoch: Annotated[
        bool, typer.Option("--last-epoch", help="Keep the mask of the last epoch instead of the best.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of masks, one per seed (0, 1, …).")] = 3,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Train on the pairs of one half of the images and score on the other half."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option("--out", help="Output file of the mask. With several --seeds, only the first mask is written."),
    ] = Path("mask.json"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    json_file: Json = None,
) -> None:
    """Train a mask of encodings on caption pairs (Section 5.2), and score it on other tasks."""
    from ..commands.slot_runs import train_masks
    from ..commands.slot_work import split_names

    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: expected a .json file, which --slots can read.")
    refuse_other_units(context, units)
    options = make_slot_options(model, data, root, features, limit, units, parts, 4, "slice")
    trainings = _trainings(clamp, epochs, last_epoch, seeds)
    train_masks(
        checkpoint,
        task,
        split_names(report_tasks),
        parse_granularity(granularity),
        trainings,
        held_out,
        options,
        out,
        check_json_path(json_file),
    )


@app.command()
def table(
    context: typer.Context,
    layout: Annotated[str, typer.Argument(help="Table of the SPARO paper: 4 or 5.")],
    checkpoints: Checkpoints,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task on which slots are selected (table 4) or masks are trained (table 5). Default: imagenet1k "
            "for table 4, sugar_crepe for table 5."
        ),
    ] = None,
    report_tasks: Annotated[
        str | None,
        typer.Option(help="Tasks that are scored. Default: sugar_crepe for table 4; vtab,imagenet1k for table 5."),
    ] = None,
    k: K = "half",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="For table 5: number of seeds, with one mask each.")] = 3,
    clamp: Annotated[
        str,
        typer.Option(
            help="For table 5: limit of the logit scale, as in `sparo slots mask --clamp`: `max` (the paper's "
            "formula) or `min` (as in CLIP)."
        ),
    ] = "max",
    parts: Annotated[
        int,
        typer.Option(min=2, help="For table 5: number of equal parts into which an encoding without slots is divided."),
    ] = 64,
    draws: Draws = 50,
    seed: Seed = 0,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    classifier_slots: Classifier = "slice",
    json_file: Json = None,
) -> None:
    """Print Table 4 (selection) or 5 (masks) of the SPARO paper for any checkpoints."""
    from evals.slots.selection_report import ChoiceOptions

    from ..commands.slot_runs import table_five, table_four
    from ..commands.slot_work import split_names

    options = make_slot_options(model, data, root, features, limit, "slots", None, 4, classifier_slots)
    # One table ignores the options of the other, so a given seed would only seem to count.
    ignored_options = {"4": ("seeds", "clamp", "parts"), "5": ("k", "draws", "seed")}
    refuse_options(context, ignored_options.get(layout, ()), f"has no effect in Table {layout}")
    if layout == "4":
        choice_options = ChoiceOptions("top", parse_k(k), False, seed, draws)
        table_four(
            checkpoints,
            task or "imagenet1k",
            report_tasks or "sugar_crepe",
            choice_options,
            options,
            check_json_path(json_file),
        )
    elif layout == "5":
        trainings = _trainings(clamp, 100, False, seeds)
        scored = split_names(report_tasks) or ["vtab", "imagenet1k"]
        table_five(checkpoints, task or "sugar_crepe", scored, parts, trainings, options, check_json_path(json_file))
    else:
        raise ConfigError(f"sparo slots table {layout}: {did_you_mean(layout, ('4', '5'))}")


@app.command()
def quality(
    checkpoints: Checkpoints,
    task: Annotated[str, typer.Option(help="Task whose images are used.")],
    reference: Annotated[
        str | None,
        typer.Option(help="Reference encoder that defines image similarity for the MonoSemanticity score."),
    ] = None,
    parts: Annotated[int, typer.Option(min=2, help="For encodings without slots: number of equal parts.")] = 64,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    json_file: Json = None,
) -> None:
    """Measure redundancy, effective number, sharpness and monosemanticity of slots."""
    from ..commands.slot_runs import show_quality

    options = make_slot_options(model, data, root, features, limit, "slots", parts, 4, "slice")
    show_quality(checkpoints, task, reference, options, check_json_path(json_file))


def _trainings(clamp: Any, epochs: int, last_epoch: bool, seeds: int) -> Any:
    from evals.slots.mask_study import MaskTraining

    if clamp not in ("max", "min"):
        raise ConfigError(f"--clamp {clamp}: {did_you_mean(clamp, ('max', 'min'))}")
    return [MaskTraining(epochs=epochs, clamp=clamp, best=not last_epoch, seed=seed) for seed in range(seeds)]
