"""`sparo papers`: the tables and figures of the five papers, with the commands that reproduce them, and the claims with their verdicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from .. import config_folders
from ..views.terminal import out
from .index import Claim, PaperItem, find_items, read_index

_FEW = 3  # items that are printed with their rows
RECORDS = "results/records"  # folder of the documentation with the records of our runs


def print_papers(words: Sequence[str]) -> None:
    """Print the items whose paper or name contains all words; a few of them with commands and rows.

    Raises:
        ConfigError: no item contains them.
    """
    found = find_items(words)
    if len(found) <= _FEW:
        for item in found:
            _print_item(item)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("item", no_wrap=True)
    for column in ("about", "command", "cost", "our result"):
        table.add_column(column, overflow="fold")
    last = ""
    for item in found:
        if item.paper != last:
            table.add_section()
            table.add_row(item.paper, "", "", "", "", style="bold")
            last = item.paper
        table.add_row(item.name, item.about, _one_command(item), item.small_cost or item.cost, item.status)
    # Folded to a terminal's width, and one line per item in a file or pipe.
    (out.print if out.is_terminal else out.print_wide)(table)


def _one_command(item: PaperItem) -> str:
    """Return the command that runs an item, the small version if there is one, or the first of several."""
    if not (item.small or item.sweep):
        return next(iter(item.commands), item.no_command)
    name = re.sub(r"[^\w. ]", " ", item.name).lower().split()
    return " ".join(
        ["sparo papers", item.paper.split()[0].lower(), *name, "--run", *(["--small"] if item.small else [])]
    )


def _print_item(item: PaperItem) -> None:
    out.print_line((f"{item.paper}: {item.name}", "bold"), f"  {item.about}")
    if item.no_command:
        out.print(f"  no command: {item.no_command}", soft_wrap=True)
    for heading, cost, commands in (
        ("at the paper's size", item.cost, item.commands),
        ("at a smaller size", item.small_cost, item.small_commands),
    ):
        if commands:
            out.print(f"  {heading}{f', {cost}' if cost else ''}:", soft_wrap=True)
        for command in commands:
            out.print(f"    {command}", soft_wrap=True)
    if item.results:
        out.print(f"  results: {item.results}", soft_wrap=True)
    if not item.rows:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("row", *item.columns, "ours", "recipe"):
        table.add_column(column, overflow="fold")
    for row in item.rows:
        numbers = [str(value) for value in row.get("paper", [""] * len(item.columns))]
        name = str(row.get("recipe", row.get("no_recipe", "")))
        table.add_row(str(row["name"]), *numbers, str(row.get("ours", "not run")), name)
    out.print_wide(table)


def find_record(claim: Claim) -> Path | None:
    """Return the record with which this project decided a claim; None without one, or outside a checkout."""
    for root in config_folders():
        path = root.parent / "docs" / RECORDS / f"{claim.sweep}.json"
        if path.is_file():
            return path
    return None


def print_claims(words: Sequence[str]) -> None:
    """Print the claims that contain all words, with their tests, and verdicts from the records of this checkout."""
    from .run import print_verdicts
    from .sweep_record import read_record
    from .verdict import Verdict, decide, test_text

    for claim in read_index().claims:
        text = f"{claim.number} {claim.claim} {' '.join(claim.items)}".lower()
        if not all(word.lower() in text for word in words):
            continue
        path = find_record(claim)
        if path is not None:
            print_verdicts([decide(claim, read_record(path))])
            continue
        print_verdicts([Verdict(claim, "not decided", (), "not run")])
        for test in claim.tests:
            out.print(f"  {test_text(test)}", soft_wrap=True)
