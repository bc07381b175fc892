"""`sparo eval`: score checkpoints; `eval_tables.py` has the verbs that show results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

from . import eval_tables
from .given_options import parse_part_or_array, parse_slots
from .plain_flags import Group

if TYPE_CHECKING:
    pass


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
            help="What to score: run folders, checkpoint folders, exports, weight files, open_clip:NAME@FILE, "
            "timm:NAME@FILE, hf:FOLDER, or pixels:SIZE (the pixels of resized images, as a baseline)."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Comma-separated names of tasks, sets or groups (see --list), or data folders."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Score one of the predefined lists of data sets: `compositional`, `datacomp` or `reviewer`. Sets "
            "that are not in --root are skipped. An estimate of the time is shown."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="YAML with `tasks:`, or a recipe (file or name) with eval.tasks. Default: the tasks of the run."
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Folder that contains the data sets listed by --list.")] = Path("data"),
    listed: Annotated[
        bool, typer.Option("--list", help="List all data sets, their expected files, and whether these exist.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="If CHECKPOINT is a weight file: name of its model, such as gap-ViT-B-16.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the model: fp32, tf32 (NVIDIA GPUs only), bf16 or fp16. Scores are computed in fp32."
        ),
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
            help="Folder in which computed encodings are stored for reuse. none: do not store them. Default: $SPARO_FEATURES or "
            "~/.cache/sparo/features."
        ),
    ] = None,
    storage: Annotated[str, typer.Option(help="Dtype of stored features: fp32 or fp16.")] = "fp32",
    slots: Annotated[
        str | None,
        typer.Option(
            help="Use only these slots of image encodings: slot numbers, such as 0,3,8-15 (the first slot is 0), or "
            "the path of a selection.json. Texts keep all slots."
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Encode only one of N equal shares of the images: I/N, or `slurm` to take I and N from the "
            "job array. Scores are computed once all shares exist."
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
    from evals.suite.eval_options import EvalOptions, features_folder
    from sparo_train.core.accelerator import find_device

    from ..commands.score import find_tasks, score_checkpoints

    for key, value, choices in (
        ("precision", precision, ("fp32", "tf32", "bf16", "fp16")),
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


for verb in (eval_tables.table, eval_tables.sweep, eval_tables.compare, eval_tables.leaderboard):
    app.command()(verb)
app.command("export")(eval_tables.export_results)
