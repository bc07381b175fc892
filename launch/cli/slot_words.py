"""Options that the verbs of `sparo slots` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .given_options import refuse_options

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
