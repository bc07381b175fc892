"""Reports about a recipe: each resolved key with its origin, and the sizes that a dry run prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from rich.table import Table

from sparo_train.core.recipe.config_keys import value_text
from sparo_train.train.dry_run import DryRun

from .terminal import out

_WIDTH = 60  # column of the comment, for lines that are not longer


def resolved_lines(config: BaseModel, origins: Mapping[tuple[str, ...], str]) -> list[str]:
    """Return YAML of the same recipe with a comment after each value: the file or override that set it, `default`, or `follows` if other keys imply it."""
    return [
        f"{line:<{_WIDTH}}  # {origin}" if origin else line
        for line, origin in _block(config, config.model_dump(mode="json"), origins, ())
    ]


def _block(
    model: Any, dumped: Mapping[str, Any], origins: Mapping[tuple[str, ...], str], above: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(above)
    for key, value in dumped.items():
        place = (*above, key)
        inner = model.get(key) if isinstance(model, Mapping) else getattr(model, key, None)
        label = f"{indent}{value_text(key)}:"
        if isinstance(value, Mapping) and value:
            yield label, ""
            yield from _block(inner, value, origins, place)
        else:
            yield f"{label} {value_text(value)}", _origin(model, key, inner, origins, place)


def _origin(model: Any, key: str, value: Any, origins: Mapping[tuple[str, ...], str], place: tuple[str, ...]) -> str:
    # The nearest block above also counts, because a block may be given as a whole.
    origin = next((origins[place[:n]] for n in range(len(place), 0, -1) if place[:n] in origins), None)
    if origin is not None:
        return origin
    field = type(model).model_fields.get(key) if isinstance(model, BaseModel) else None
    return "default" if field is None or field.get_default(call_default_factory=True) == value else "follows"


def show_dry(dry: DryRun, name: str, batch_size: int) -> None:
    """Print a dry run of the recipe `name`."""
    table = Table(title=f"{name}: parameters", title_justify="left")
    table.add_column("module")
    table.add_column("parameters", justify="right")
    for name, count in dry.parameters.items():
        table.add_row(name, f"{count:,}")
    table.add_section()
    table.add_row("all", f"{sum(dry.parameters.values()):,}")
    if dry.trained != sum(dry.parameters.values()):
        table.add_row("trained", f"{dry.trained:,}")
    out.print(table)
    if dry.encoding is None:
        out.print(
            "memory per sample cannot be estimated, because the objective does not define `footprint`", soft_wrap=True
        )
    else:
        tokens = ", per ".join(f"{name} {count}" for name, count in dry.tokens.items())
        out.print(f"tokens per {tokens}; an encoding has {dry.encoding} values")
    sources = Table(title="data", title_justify="left")
    for column in ("source", "shards", "samples", "weight", "share of an epoch", "passes over it"):
        sources.add_column(column, justify="left" if column == "source" else "right")
    for f in dry.sources:
        # A missing source has no size, and a dry run should report that.
        share = "-" if f.share is None else f"{f.share:.1%}"
        passes = "-" if f.passes is None else f"{f.passes:.2f}"
        sources.add_row(f.name, _number(f.shards), _number(f.samples), f"{f.weight:g}", share, passes)
    out.print(sources)
    for f in dry.sources:
        if f.problem:
            out.print(
                f"training cannot start on this machine: {f.problem}"
                if f.samples is None
                else f"{f.name}: {f.problem}",
                soft_wrap=True,
            )
    out.print(
        f"one epoch: {_number(dry.epoch_size)} samples; training: {_number(dry.steps)} steps x {batch_size} = {_number(dry.samples)} samples"
    )
    for line in dry.warnings:
        out.print(line, soft_wrap=True)
    memory = Table(title="memory per rank, estimated", title_justify="left")
    memory.add_column("")
    memory.add_column("GiB", justify="right")
    for name, size in dry.memory.items():
        memory.add_row(name, f"{size / 2**30:.2f}")
    memory.add_section()
    memory.add_row("all", f"{sum(dry.memory.values()) / 2**30:.2f}")
    out.print(memory)


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
