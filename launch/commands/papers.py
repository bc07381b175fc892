"""`sparo papers`: the tables and figures of the five papers, with the commands that reproduce them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich import box
from rich.table import Table

from sparo_train.core.errors import ConfigError, did_you_mean

from ..views.terminal import out

_FEW = 3  # items that are printed with their rows


class PaperItem(NamedTuple):
    """A table or figure of a paper.

    Attributes:
        paper: short name of the paper.
        name, about: as in the paper, and its content.
        commands: the commands that reproduce it; empty: none is needed or known.
        columns, rows: of a table, with the paper's numbers (`paper`), the recipe of each row, and our number (`ours`) if
            there is one.
        results: page with our results at a smaller size; empty: there is none.
    """

    paper: str
    name: str
    about: str
    commands: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    results: str

    @property
    def status(self) -> str:
        """Describe how far it was run in this project."""
        if any("ours" in row for row in self.rows):
            return "measured"
        return "measured at a smaller size" if self.results else "not run"


def read_items() -> list[PaperItem]:
    """Return all tables and figures, from the file that the documentation's index is made of."""
    tree = yaml.safe_load((Path(__file__).parent / "papers.yaml").read_text(encoding="utf-8"))
    return [_item(paper["title"], item) for paper in tree["papers"] for item in paper["items"]]


def _item(paper: str, item: Mapping[str, Any]) -> PaperItem:
    commands = item.get("command", [])
    link = re.search(r"\]\(((?:results|guides)/[^)]+)\)", item.get("text", ""))
    return PaperItem(
        paper,
        str(item["name"]),
        str(item["about"]),
        [commands] if isinstance(commands, str) else commands,
        [str(column) for column in item.get("columns", [])],
        item.get("rows", []),
        f"docs/{link[1]}" if link else "",
    )


def print_papers(words: Sequence[str]) -> None:
    """Print the items whose paper or name contains all words; a few of them with commands and rows.

    Raises:
        ConfigError: no item contains them.
    """
    items = read_items()
    found = [item for item in items if _matches(item, words)]
    if not found:
        raise ConfigError(_no_match_message(items, words))
    if len(found) <= _FEW:
        for item in found:
            _print_item(item)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("item", no_wrap=True)
    for column in ("about", "first command", "our result"):
        table.add_column(column, overflow="fold")
    last = ""
    for item in found:
        if item.paper != last:
            table.add_section()
            table.add_row(item.paper, "", "", "", style="bold")
            last = item.paper
        table.add_row(item.name, item.about, item.commands[0] if item.commands else "", item.status)
    out.print(table)


def _no_match_message(items: Sequence[PaperItem], words: Sequence[str]) -> str:
    for word in words:
        if not any(_matches(item, [word]) for item in items):
            known = dict.fromkeys(part for item in items for part in re.findall(r"\w{2,}", _text(item)))
            return f"{word}: no paper, table or figure has this word; {did_you_mean(word.lower(), known)}"
    return f"{' '.join(words)}: no table or figure has all of these words. Use fewer words; sparo papers lists all."


def _text(item: PaperItem) -> str:
    return f"{item.paper} {item.name}".lower()


def _matches(item: PaperItem, words: Sequence[str]) -> bool:
    # Whole words, so that "figure 1" is not figure 10.
    text = _text(item)
    expanded = [word.lower().replace("figure", "fig") for word in words]
    return all(
        re.search(rf"(?<![\w.]){re.escape(word)}(?!\w|\.\d)", text) or (len(word) > 3 and word in text)
        for word in expanded
    )


def _print_item(item: PaperItem) -> None:
    out.print_line((f"{item.paper}: {item.name}", "bold"), f"  {item.about}")
    for command in item.commands:
        out.print(f"  {command}", soft_wrap=True)
    if item.results:
        out.print(f"  at a smaller size: {item.results}", soft_wrap=True)
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
