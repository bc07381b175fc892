"""Values of command-line options: parsed and checked before anything expensive begins; a recipe with its overrides."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # not needed for `sparo --help`
    from sparo_train.train.run_config import RunConfig

ALLOW_UNKNOWN_OPTIONS = {"ignore_unknown_options": True}  # `--optim.lr 1e-3` is answered with the correct form


def _complete(incomplete: str) -> list[str]:
    from ..recipes import shipped_recipes

    names = [own.name for own in shipped_recipes()]
    stems = [
        # Only short names that a single recipe has.
        stem
        for name in names
        if [n.rpartition("/")[2] for n in names].count(stem := name.rpartition("/")[2]) == 1
    ]
    return [word for word in [*names, *stems] if word.startswith(incomplete)]


Recipe = Annotated[
    Path,
    typer.Argument(
        help="YAML file, or name of a shipped recipe such as emoji_small (`sparo recipes`).",
        autocompletion=_complete,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides, as in optim.lr=1e-3. +key=… adds an entry, key=null removes it."
    ),
]


def normalize_overrides(overrides: Sequence[str] | None) -> list[str]:
    """Return the overrides with each `--key VALUE` joined into one, so that the error can show how to write it."""
    normalized: list[str] = []
    for word in overrides or []:
        if normalized and normalized[-1].startswith("-") and "=" not in normalized[-1] and "=" not in word:
            normalized[-1] = f"{normalized[-1]}={word}"
        else:
            normalized.append(word)
    return normalized


def load_run_config(recipe: Path, overrides: Sequence[str] | None) -> RunConfig:
    """Return the resolved recipe of a file or name and its overrides. Raises `ConfigError`."""
    from sparo_train.train.run_config import load_run

    from ..recipes import find_recipe

    return load_run(find_recipe(recipe), normalize_overrides(overrides))


def refuse_keys_as_options(options: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that is a recipe key but not a cluster key."""
    from sparo_train.core.recipe.layers import assignment
    from sparo_train.train.run_config import RunConfig

    from ..jobs.clusters import ClusterConfig

    for word in normalize_overrides(options):
        root = word.lstrip("-").partition("=")[0].partition(".")[0]
        if root in RunConfig.model_fields and root.replace("-", "_") not in ClusterConfig.model_fields:
            assignment(word, RunConfig)


def refuse_options(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise `ConfigError` for an option that was given but has no effect, even with its default value."""
    for name in names:
        # By its source, because an option may be given with its default value.
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')}: {why}. Remove it.")


def parse_part(text: str | None, others: str = "") -> tuple[int, int] | None:
    """Parse `I/N`, with I from 0. `others` lists further valid values for the error."""
    if text is None:
        return None
    number, slash, of = text.partition("/")
    # isdecimal, not isdigit: int() fails for ².
    if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise ConfigError(f"--part {text}: expected I/N, such as 0/4, with I from 0 to N-1{others}.")
    return int(number), int(of)


def parse_part_or_array(text: str | None, features: Path | None) -> tuple[int, int] | None:
    """Parse `I/N`, with I from 0, or read the index of the SLURM array."""
    if text is None:
        return None
    if features is None:
        raise ConfigError(
            "--part: needs the feature store, got --features none. Processes share their work through the store. "
            "Remove --features none."
        )
    if text == "slurm":
        values = [os.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "MIN", "COUNT")]
        # SLURM numbers an array as requested, not from 0: the smallest number is the first part.
        if not all(v.isdigit() for v in values):
            raise ConfigError(
                "--part slurm: SLURM_ARRAY_TASK_ID, SLURM_ARRAY_TASK_MIN and SLURM_ARRAY_TASK_COUNT are not set. "
                "Use --part slurm in a SLURM array, or set --part I/N."
            )
        return int(values[0]) - int(values[1]), int(values[2])
    return parse_part(text, ", or slurm")


def parse_slots(text: str | None) -> tuple[int, ...] | Path | None:
    """Parse `0,3,8-15` into sorted unique numbers, or the name of a file into its path."""
    if text is None:
        return None
    # A missing file is recognized by its suffix, so that the error is about the file.
    if text.endswith(".json") or Path(text).is_file():
        return Path(text)
    slots: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (
            dash and not (last.isdecimal() and int(first) <= int(last) < int(first) + 100_000)
        ):
            raise ConfigError(
                f"--slots {text}: {word!r} is not a slot number. Write numbers or ranges, counted from 0, as in `0,3,8-15`, or name a selection.json."
            )
        slots.update(range(int(first), int(last or first) + 1))
    # Sorted, because slots keep their order in an encoding, whatever the order of options.
    return tuple(sorted(slots))


def check_json_path(path: Path | None) -> Path | None:
    """Raise `ConfigError` if a file cannot be written, before anything is encoded."""
    from evals.report.results_file import refuse_unwritable

    if path is not None:
        if path.is_dir():
            raise ConfigError(f"--json {path}: is a folder. Name a file.")
        refuse_unwritable(path.parent, f"--json {path}")
    return path


def check_figure_path(path: Path | None, option: str) -> Path | None:
    """Raise `ConfigError` for a file type that cannot be plotted, before anything is scored."""
    if path is not None and path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{option} {path}: expected a .png, .pdf or .svg file.")
    return path


def parse_k(k: str) -> int | None:
    """Parse a number of units: `half` is None, `best` is 0."""
    if k in ("half", "best"):
        return None if k == "half" else 0
    if not k.isdecimal() or not 0 < int(k) < 1_000_000:
        raise ConfigError(f"--k {k}: expected `half`, `best`, or a number of at least 1.")
    return int(k)


def parse_granularity(word: str) -> Any:
    """Return `unit` or `dimension`. Raises `ConfigError` for another word."""
    if word not in ("unit", "dimension"):
        raise ConfigError(f"--granularity {word}: {did_you_mean(word, ('unit', 'dimension'))}")
    return word
