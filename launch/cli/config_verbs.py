"""`sparo recipes`, `sparo config`: what there is to train, and what every key of it means."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from ..views.terminal import out


def recipes(word: Annotated[str | None, typer.Argument(help="only those whose name or line has it")] = None) -> None:
    """List the recipes that come with sparo; `sparo train NAME` trains one."""
    from sparo_train.core.errors import ConfigError

    from ..commands.recipes import shipped_recipes

    matches = [own for own in shipped_recipes() if word is None or word.lower() in f"{own.name} {own.line}".lower()]
    if not matches:
        raise ConfigError(f"{word}: no recipe has it; `sparo recipes` lists all")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for own in matches:
        table.add_row(own.name, Text(own.line, style="dim"))
    out.print(table)


def config(
    key: Annotated[str, typer.Argument(help="a key or block, optim.lr or optim; the end of one: lr")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="docs/config.md: every key there is")] = False,
) -> None:
    """Say what a recipe's keys mean: type, default, meaning, example."""
    from ..commands.key_tables import describe_key, example, examples, find_keys, page

    if markdown:
        out.file.write(page())
        return
    example_by_key = examples() if key else {}
    keys = find_keys(key)
    if len(keys) > 1:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("key", overflow="fold")
        table.add_column("meaning")
        for one in keys:
            table.add_row(f"{one.dotted}" + (f"  [{one.entry_label}]" if one.entry_label else ""), describe_key(one))
        out.print(table)
        return
    one = keys[0]
    out.print(f"{one.dotted}" + (f"  [{one.entry_label}]" if one.entry_label else ""))
    out.print(f"  {describe_key(one)}")
    if written := example(one, example_by_key):
        out.print(f"  example: {written}", soft_wrap=True)
