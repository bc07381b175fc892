"""`sparo slots`: single slots' scores, selections, masks, the paper's Tables 4 and 5, and what slots are like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

from .given_options import check_figure_path, check_json_path, parse_granularity, parse_k, parse_slots, refuse_options

Checkpoint = Annotated[str, typer.Argument(help="anything that `sparo eval` takes")]
Checkpoints = Annotated[list[str], typer.Argument(help="anything that `sparo eval` takes")]
Model = Annotated[str | None, typer.Option(help="for weight files: a model name")]
Data = Annotated[Path | None, typer.Option(help="YAML with `tasks:`, or a recipe (default: the run's own eval.tasks)")]
Root = Annotated[Path, typer.Option(help="folder of the sets of `sparo eval --list`")]
Store = Annotated[str | None, typer.Option("--features", help="folder of the feature store, or none")]
Limit = Annotated[int | None, typer.Option(min=1, help="so many images per set, evenly spaced")]
Kind = Annotated[
    str, typer.Option("--units", help="slots; parts: of any encoding, see --parts; heads: of an ordinary open_clip ViT")
]
Parts = Annotated[int | None, typer.Option(min=2, help="of --units parts: into how many equal parts to cut")]
Layers = Annotated[
    int, typer.Option("--head-layers", min=1, help="of --units heads: the last blocks, whose heads they are")
]
Classifier = Annotated[
    str, typer.Option("--classifier-slots", help="class vectors' slots: slice (as they are) or renorm (of one norm)")
]
Seed = Annotated[int, typer.Option(min=0, help="of what is drawn: halves and random orders")]
Draws = Annotated[int, typer.Option(min=1, max=10_000, help="random orders of the control")]
Json = Annotated[Path | None, typer.Option("--json", help="also write all numbers here")]
K = Annotated[
    str, typer.Option("--k", help="how many units; half, or best: as many as score best where they are chosen")
]


def refuse_other_units(context: typer.Context, units: str) -> None:
    """Raise `ConfigError` for what is typed of units that are not asked for."""
    for name, kind in (("parts", "parts"), ("head_layers", "heads")):
        if units != kind:
            refuse_options(context, (name,), f"is of --units {kind}")


def make_slot_options(
    model: str | None, data: Path | None, root: Path, features: str | None, limit: int | None,
    units: str, parts: int | None, head_layers: int, classifier_slots: str,
) -> Any:  # fmt: skip
    """What was given behind them, for `launch.commands.slot_work`."""
    from evals.report.results_file import refuse_unwritable
    from evals.suite.evaluate import features_folder

    from ..commands.slot_work import SlotOptions

    folder = features_folder() if features is None else None if features == "none" else Path(features)
    if features not in (None, "none"):
        refuse_unwritable(Path(features), "--features")
    return SlotOptions(model, data, root, folder, limit, units, parts, head_layers, classifier_slots)


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at a checkpoint's slots one by one, choose among them, and see what the choice does.",
)


@app.command()
def score(
    context: typer.Context,
    checkpoint: Checkpoint,
    tasks: Annotated[
        str | None, typer.Option(help="tasks, as `sparo eval --tasks` takes them (default: all that fit)")
    ] = None,
    sort: Annotated[str | None, typer.Option(help="order rows by this task (default: by number)")] = None,
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
    """Each unit's score alone, and that of all the others, task by task."""
    from ..commands.slot_runs import score_units
    from ..commands.slot_work import split_names

    refuse_other_units(context, units)
    options = make_slot_options(model, data, root, features, limit, units, parts, head_layers, classifier_slots)
    score_units(checkpoint, split_names(tasks), sort, options, check_json_path(json_file))


@app.command()
def select(
    context: typer.Context,
    checkpoint: Checkpoint,
    task: Annotated[str, typer.Option(help="the task that units are chosen on")],
    report_tasks: Annotated[
        str | None, typer.Option(help="tasks that the choice is reported on (default: all that fit)")
    ] = None,
    method: Annotated[
        str, typer.Option(help="top (the paper's), forward, backward, cover; bottom, random: controls")
    ] = "top",
    k: K = "half",
    slots: Annotated[
        str | None, typer.Option(help="by hand in place of --method: 0,3,8-15, or a selection.json")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out/--same-data", help="choose on half of the images, report on the other half")
    ] = True,
    out: Annotated[Path, typer.Option("--out", help="where the selection goes")] = Path("selection.json"),
    plot: Annotated[Path | None, typer.Option(help="also draw the curves here (PNG, PDF or SVG)")] = None,
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
    """Choose units on one task, write selection.json, and report what the choice does, beside random and worst ones."""
    from evals.slots.selection_report import ChoiceOptions

    from ..commands.slot_runs import SelectOptions, select_units
    from ..commands.slot_work import split_names

    methods = ("top", "forward", "backward", "cover", "bottom", "random")
    if method not in methods:
        raise ConfigError(f"--method {method}: {did_you_mean(method, methods)}")
    check_figure_path(plot, "--plot")
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: name a .json file, by which --slots knows it")
    refuse_other_units(context, units)
    if slots is not None:
        refuse_options(context, ("method", "k"), "is of a choice that is made, and --slots is one that was")
    options = make_slot_options(model, data, root, features, limit, units, parts, head_layers, classifier_slots)
    select_options = SelectOptions(
        task, split_names(report_tasks), parse_slots(slots), out, plot, check_json_path(json_file)
    )
    select_units(checkpoint, select_options, ChoiceOptions(method, parse_k(k), held_out, seed, draws), options)


@app.command()
def mask(
    context: typer.Context,
    checkpoint: Checkpoint,
    task: Annotated[str, typer.Option(help="the task of kind pairs that the mask is trained on")] = "sugar_crepe",
    report_tasks: Annotated[
        str | None, typer.Option(help="tasks of kind zeroshot that it is scored on (default: all that fit)")
    ] = None,
    granularity: Annotated[
        str, typer.Option(help="unit: a number per slot or part; number: one per number of an encoding")
    ] = "unit",
    clamp: Annotated[
        str, typer.Option(help="of the temperature: max (the paper's formula) or min (CLIP's clamp)")
    ] = "max",
    epochs: Annotated[int, typer.Option(min=1, max=100_000)] = 100,
    last_epoch: Annotated[
        bool, typer.Option("--last-epoch", help="keep the last epoch's mask, not the best one's")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="how many masks, seeds 0, 1, …")] = 3,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="train on half of the images' pairs, score on the other half")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="where the first seed's mask goes")] = Path("mask.json"),
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    units: Kind = "slots",
    parts: Parts = None,
    json_file: Json = None,
) -> None:
    """Train a mask of encodings on pairs of captions (Section 5.2), and score it elsewhere without another pass over images."""
    from ..commands.slot_runs import train_masks
    from ..commands.slot_work import split_names

    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: name a .json file, by which --slots knows it")
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
    layout: Annotated[str, typer.Argument(help="4 or 5, as in the SPARO paper")],
    checkpoints: Checkpoints,
    task: Annotated[
        str | None, typer.Option(help="what is learnt from (default: imagenet1k for 4, sugar_crepe for 5)")
    ] = None,
    report_tasks: Annotated[
        str | None, typer.Option(help="what is scored (default: sugar_crepe for 4, vtab,imagenet1k for 5)")
    ] = None,
    k: K = "half",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="of 5: masks per row")] = 3,
    clamp: Annotated[str, typer.Option(help="of 5: max (the paper's formula) or min (CLIP's clamp)")] = "max",
    parts: Annotated[int, typer.Option(min=2, help="of 5: parts that an encoding without slots is cut into")] = 64,
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
    """The SPARO paper's Table 4 (selection) or 5 (masks), for any checkpoints."""
    from evals.slots.selection_report import ChoiceOptions

    from ..commands.slot_runs import table_five, table_four
    from ..commands.slot_work import split_names

    options = make_slot_options(model, data, root, features, limit, "slots", None, 4, classifier_slots)
    # What one table reads the other ignores: a seed that was typed would seem to count.
    ignored_options = {"4": ("seeds", "clamp", "parts"), "5": ("k", "draws", "seed")}
    refuse_options(context, ignored_options.get(layout, ()), f"does nothing in Table {layout}")
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
    task: Annotated[str, typer.Option(help="the task whose images are looked at")],
    reference: Annotated[
        str | None,
        typer.Option(help="a checkpoint of another kind, by whose eyes images are alike: for MonoSemanticity"),
    ] = None,
    parts: Annotated[int, typer.Option(min=2, help="parts that an encoding without slots is cut into")] = 64,
    model: Model = None,
    data: Data = None,
    root: Root = Path("data"),
    features: Store = None,
    limit: Limit = None,
    json_file: Json = None,
) -> None:
    """How much slots repeat each other, how many there are in effect, how sharply they look, how much of one meaning they are."""
    from ..commands.slot_runs import show_quality

    options = make_slot_options(model, data, root, features, limit, "slots", parts, 4, "slice")
    show_quality(checkpoints, task, reference, options, check_json_path(json_file))


def _trainings(clamp: Any, epochs: int, last_epoch: bool, seeds: int) -> Any:
    from evals.slots.mask_study import MaskTraining

    if clamp not in ("max", "min"):
        raise ConfigError(f"--clamp {clamp}: {did_you_mean(clamp, ('max', 'min'))}")
    return [MaskTraining(epochs=epochs, clamp=clamp, best=not last_epoch, seed=seed) for seed in range(seeds)]
