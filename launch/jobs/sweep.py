"""Sweeps: a file with several runs, or an override with a list for a key that takes no list."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sparo_train.core.config import Frozen, field, invalid_keys, resolve
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import read_json, write_whole
from sparo_train.core.recipe.layers import is_sweep, load_recipe, override
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.train.run_config import RunConfig, load_run

from ..recipes import find_recipe
from .records import SWEEP_FILE

_MOST = 1000  # elements that SLURM's MaxArraySize allows by default


class SweepRun(Frozen):
    """One run of a sweep file."""

    recipe: str | None = field(
        None,
        "Recipe of this run: a path relative to the sweep file, or a shipped recipe. Default: the sweep's key `recipe`.",
    )
    overrides: tuple[str, ...] = field((), "Overrides as `sparo train` takes them.")
    series: str = field(
        "",
        "Series of this run in the figure: runs of a series share a line, or a color of bars. Default: the run's name.",
    )
    x: float | str | None = field(None, "Place of this run on the figure's x axis.")


class SweepFigure(Frozen):
    """Figure of a sweep: a score of every run over `x`, with a line or a color per `series`, and intervals over seeds."""

    kind: Literal["lines", "bars"] = field("lines", "lines: x is a number. bars: x is a name, such as a data set.")
    score: str = field(..., "TASK/METRIC on the y axis.", examples=["masks/fg_ari"])
    x_label: str = field("", "Label of the x axis.")
    y_label: str = field("", "Label of the y axis. Default: the score.")
    log_x: bool = field(False, "Logarithmic x axis, with base 2.")
    relative_to: str = field(
        "",
        "Name of a reference series. Every value is divided by the mean of this series at the same x, for example to show relative losses. Default: none.",
    )


class Measure(Frozen):
    """A `sparo` command that measures a finished run, for scores that its tasks do not contain."""

    command: str = field(
        ...,
        "Command. {run} is replaced by the run's folder, {file} by the JSON file that the command writes.",
        examples=["sparo slots select {run} --task pairs --json {file}"],
    )
    scores: dict[str, str] = field(
        ...,
        "Path of each score in the JSON file, with parts separated by dots. A part is a key, the index of a list "
        "element, or that element's value of `task`.",
        min_length=1,
    )
    rows: tuple[str, ...] = field((), "Runs of the sweep that are measured. Default: all.")


class SweepFile(Frozen):
    """Runs that belong together, such as the rows of a table. Each is called FILE-NAME."""

    recipe: str | None = field(
        None, "Recipe of runs without a key `recipe`: a path relative to the sweep file, or a shipped recipe."
    )
    overrides: tuple[str, ...] = field((), "Overrides for all runs, applied before the overrides of each run.")
    runs: dict[str, SweepRun] = field(..., "Runs: a mapping from the name of each run to its settings.", min_length=1)
    data: tuple[str, ...] = field((), "`sparo data` commands that make the data.", examples=[["sparo data scenes"]])
    measures: dict[str, Measure] = field({}, "Measurements of finished runs, by name.")
    figure: SweepFigure | None = field(
        None, "Figure to draw. Default: the score plotted against the number of parameters."
    )


def read_sweep(path: Path) -> SweepFile:
    """Read a sweep file.

    Raises:
        ConfigError: not a sweep file.
    """
    if not is_sweep(load_recipe(path)):
        raise ConfigError(f"{path}: has no runs. For runs of one recipe, use `sparo eval table RUNS --seeds`.")
    return resolve(SweepFile, load_recipe(path, SweepFile), str(path))


def expand(
    recipe: Path, overrides: Sequence[str], seeds: int | None = None, machine: Literal["cpu", "gpu"] | None = None
) -> tuple[str, list[RunConfig]]:
    """Return the sweep's name, and all its runs as resolved recipes with their own names.

    There is one for every run of a sweep file, every combination of the lists in `overrides`, and every seed.

    Args:
        recipe: a recipe, or a sweep file.
        overrides: of the command line; they take precedence.
        seeds: number of runs each, with the recipe's seed, the next, …; None: only the recipe's, without a suffix.
        machine: where the runs train, for recipes with `auto: here`; None: on this machine.

    Raises:
        ConfigError: a recipe that does not resolve, two runs with one name, or more runs than an array may have.
    """
    if not is_sweep(load_recipe(recipe)):
        return _expand_recipe(recipe, overrides, seeds, machine)
    sweep, configs = read_sweep(recipe), list[RunConfig]()
    for name, run in sweep.runs.items():
        if (run_recipe := run.recipe or sweep.recipe) is None:
            raise ConfigError(
                f"{recipe}: runs.{name}.recipe: is required, because the file does not name a common recipe"
            )
        # Later overrides take precedence: the sweep's, the run's, then the command line's.
        run_overrides = [f"name={recipe.stem}-{name}", *sweep.overrides, *run.overrides, *overrides]
        configs += _expand_recipe(_find_recipe(recipe.parent, run_recipe), run_overrides, seeds, machine)[1]
    if len(configs) > _MOST:
        raise ConfigError(f"{len(configs)} runs: more than {_MOST} in one array. Remove runs from {recipe}.")
    _refuse_duplicates([run.name for run in configs])
    return recipe.stem, configs


def _find_recipe(folder: Path, name: str) -> Path:
    """Return the recipe that a sweep file names: a path relative to its folder, or the name of a shipped recipe."""
    path = folder / name
    return path if path.exists() else find_recipe(Path(name))


def sweep_folder(out: str, name: str) -> Path:
    """Return the folder of a sweep in `out`, the folder of its runs: NAME, or NAME-sweep if NAME is a run."""
    folder = Path(out) / name
    return folder.with_name(f"{name}-sweep") if (folder / "config.yaml").exists() else folder


def record_sweep(folder: Path, names: Sequence[str]) -> None:
    """Add runs to the list of a sweep's folder, so that commands accept the folder in place of its runs."""
    path = folder / SWEEP_FILE
    before = read_json(path, dict).get("runs", []) if path.exists() else []
    write_whole(path, json.dumps({"runs": list(dict.fromkeys([*before, *names]))}, indent=1) + "\n")


def _expand_recipe(
    recipe: Path, overrides: Sequence[str], seeds: int | None, machine: str | None
) -> tuple[str, list[RunConfig]]:
    auto = next(
        (o.partition("=")[2] for o in reversed(overrides) if o.startswith("auto=")), load_recipe(recipe).get("auto")
    )
    if machine is not None and auto == "here":
        overrides = [*overrides, f"auto={machine}"]
    axes: dict[str, list[Any]] = {}
    words: list[str] = []  # overrides in the order of the command line; an axis is its key
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        parsed = parse_yaml(value, f"override {text!r}") if equals else None
        if axes.pop(key, None) is not None:  # a later value replaces the list
            words.remove(key)
        if inner := next((axis for axis in axes if axis.startswith(f"{key}.")), None):
            raise ConfigError(
                f"override {text!r}: replaces the block that contains {inner}, but an earlier override sets {inner} to a list. Swap the two overrides."
            )
        if isinstance(parsed, list) and not _accepts_list(recipe, overrides, text):
            if not parsed:
                raise ConfigError(f"override {text!r}: an empty list of values")
            axes[key] = parsed
            words.append(key)
        else:
            words.append(text)

    def assign(values: Mapping[str, Any]) -> list[str]:
        return [_assign(word, values[word]) if word in values else word for word in words]

    # With the first value of each axis, because a recipe may not resolve without one.
    base = load_run(recipe, assign({key: values[0] for key, values in axes.items()}))
    if seeds is not None:
        if seeds < 1:
            raise ConfigError(f"--seeds: must be at least 1, got {seeds}.")
        if "seed" in axes:
            raise ConfigError(f"--seeds {seeds}: cannot be combined with seed=[…]. Remove one of them.")
        axes["seed"] = list(range(base.seed, base.seed + seeds))
        words.append("seed")
    count = math.prod(map(len, axes.values()))
    if count > _MOST:
        raise ConfigError(f"{count} runs: more than {_MOST} in one array. Sweep over fewer values.")
    configs = []
    for values in itertools.product(*axes.values()):
        given = dict(zip(axes, values, strict=True))
        name = "-".join([base.name, *(_suffix(key, value, axes) for key, value in zip(axes, values, strict=True))])
        # The name last, so that it replaces one in the overrides: two runs of a sweep never share a folder.
        configs.append(load_run(recipe, [*assign(given), f"name={json.dumps(name)}"]) if given else base)
    _refuse_duplicates([run.name for run in configs])
    return base.name, configs


def _accepts_list(recipe: Path, overrides: Sequence[str], text: str) -> bool:
    """Return whether the recipe's key takes a list, so that the override is a value instead of a sweep."""
    others = [o for o in overrides if o != text and not isinstance(parse_yaml(o.partition("=")[2], o), list)]
    tree = override(load_recipe(recipe), [*others, text], RunConfig)
    # A recipe without a name has that problem, not one with this key.
    tree.setdefault("name", "x")
    at = text.removeprefix("+").partition("=")[0].strip().split(".")
    return not any(at == list(map(str, where))[: len(at)] for where in invalid_keys(RunConfig, tree))


def _assign(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def _suffix(key: str, value: Any, axes: dict[str, list[Any]]) -> str:
    """Return `lr0.001`, or the whole key if two end alike, with characters that a run's name may contain."""
    # Two keys may both end in `lr`, so names must distinguish them.
    last = key.rpartition(".")[2]
    short = last if sum(k.rpartition(".")[2] == last for k in axes) == 1 else key
    text = value.get("kind", json.dumps(value)) if isinstance(value, dict) else value
    text = f"{text:g}" if isinstance(text, float) else str(text)
    return f"{short}{re.sub(r'[^A-Za-z0-9._-]+', '_', text).strip('_')}"


def _refuse_duplicates(names: Sequence[str]) -> None:
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise ConfigError(
            f"two runs of the sweep would be called {duplicate!r}. Choose values that lead to different run names."
        )
