"""Printing a dry run."""

from __future__ import annotations

from rich.table import Table

from sparo_train.train.dry_run import dry_run
from sparo_train.train.run_config import RunConfig

from .terminal import out


def show_dry(config: RunConfig) -> None:
    """Resolve, count on the meta device, print."""
    dry = dry_run(config)
    table = Table(title=f"{config.name}: parameters", title_justify="left")
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
        out.print("what a sample amounts to is not known: the objective has no footprint")
    else:
        tokens = ", per ".join(f"{name} {count}" for name, count in dry.tokens.items())
        out.print(f"tokens per {tokens}; an encoding has {dry.encoding} numbers")
    sources = Table(title="data", title_justify="left")
    for column in ("source", "shards", "samples", "weight", "share of an epoch", "passes over it"):
        sources.add_column(column, justify="left" if column == "source" else "right")
    for f in dry.sources:
        # A source that is not there yet has no size, and a dry run is there to be told so.
        share = "-" if f.share is None else f"{f.share:.1%}"
        passes = "-" if f.passes is None else f"{f.passes:.2f}"
        sources.add_row(f.name, _number(f.shards), _number(f.samples), f"{f.weight:g}", share, passes)
    out.print(sources)
    for f in dry.sources:
        if f.problem:
            out.print(
                f"training here would be refused: {f.problem}" if f.samples is None else f"{f.name}: {f.problem}",
                soft_wrap=True,
            )
    out.print(
        f"epoch {_number(dry.epoch_size)} samples; {_number(dry.steps)} steps x {config.batch_size} = {_number(dry.samples)} samples"
    )
    for line in dry.unused_keys:
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
