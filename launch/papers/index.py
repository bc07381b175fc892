"""Index of the five papers: tables, figures and claims, from the file that the documentation's page of papers is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from sparo_train.core.errors import ConfigError, did_you_mean

FILE = Path(__file__).parent / "papers.yaml"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PaperItem(_Entry):
    """A table or figure of a paper.

    Attributes:
        name, about: as in the paper, and its content.
        text: what else a reader should know, with links to pages of the documentation.
        command: commands that reproduce it, besides those of the sweep.
        columns, rows: of a table, with the paper's numbers (`paper`), the recipe of each row, and our number (`ours`).
        sweep: file in configs/sweeps without suffix, at the paper's size.
        small: the same for a version that trains on a laptop.
        seeds: of the sweep in the paper.
        layout: layout of `sparo eval sweep` that prints the paper's table.
        cost: size of the paper's trainings.
        small_cost: measured or estimated size of the small version.
        no_command: why nothing is to be run.
        paper: name of the paper, added while reading.
    """

    name: str
    about: str
    text: str = ""
    command: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    sweep: str = ""
    small: str = ""
    seeds: int = 1
    layout: str = ""
    cost: str = ""
    small_cost: str = ""
    no_command: str = ""
    paper: str = ""

    @property
    def commands(self) -> list[str]:
        """Return all commands that reproduce it at the paper's size."""
        own = sweep_commands(self.sweep, self.seeds, "slurm", self.layout) if self.sweep else []
        return [*own, *self.command]

    @property
    def small_commands(self) -> list[str]:
        """Return the commands of the small version."""
        return sweep_commands(self.small, 5, "local", "") if self.small else []

    @property
    def results(self) -> str:
        """Return the page of the documentation with results at a smaller size; empty if there is none."""
        link = re.search(r"\]\(((?:results|guides)/[^)]+)\)", self.text)
        return f"docs/{link[1]}" if link else ""

    @property
    def status(self) -> str:
        """Describe how far it was run in this project."""
        if self.no_command:
            return "nothing to run"
        if any("ours" in row for row in self.rows):
            return "measured"
        return "measured at a smaller size" if self.results else "not run"


class Paper(_Entry):
    """A paper: its items, and the defaults of our keys that follow from its sentences."""

    title: str
    short: str
    citation: str
    items: tuple[PaperItem, ...]
    defaults: tuple[dict[str, Any], ...]


class ClaimTest(_Entry):
    """A test of a claim: the difference of two rows' means of a score, or one row's mean, over seeds.

    Attributes:
        score: TASK/METRIC of the sweep's record.
        row, than: rows of the sweep; without `than`, the mean of `row` is compared with `value`.
        expect: greater: more than `margin` above; less: more than `margin` below; at_least: at most `margin` below;
            equal: at most `margin` away; different: not equal, which is refuted by an interval within `margin`.
        margin: in units of the score.
    """

    score: str
    row: str
    than: str = ""
    value: float = 0.0
    expect: Literal["greater", "less", "at_least", "equal", "different"] = "greater"
    margin: float = 0.0

    @model_validator(mode="after")
    def _check_margin(self) -> ClaimTest:
        if self.expect in ("at_least", "equal", "different") and self.margin <= 0:
            raise ValueError(f"margin: must be positive for expect={self.expect}, got {self.margin}")
        return self


class Control(_Entry):
    """A sign that the baseline has learned: in every seed, the score of a row is above a value."""

    row: str
    score: str
    above: float
    why: str


class Claim(_Entry):
    """A claim of a paper with its test, stated before the runs.

    Attributes:
        number: in the order of the documentation.
        claim: one sentence.
        papers: items that make it, as `PAPER: ITEM`.
        sweep: file in configs/sweeps without suffix.
        seeds: number that decides.
        why: why this data can decide it.
        controls: signs that the baseline has learned; empty with `no_control`, which says why none is needed.
        tests: all have to hold.
    """

    number: int
    claim: str
    items: tuple[str, ...]
    sweep: str
    seeds: int = 5
    why: str
    controls: tuple[Control, ...] = ()
    no_control: str = ""
    tests: tuple[ClaimTest, ...]

    @model_validator(mode="after")
    def _has_control(self) -> Claim:
        if bool(self.controls) == bool(self.no_control):
            raise ValueError("expected exactly one of the keys `controls` and `no_control`")
        return self


class Index(_Entry):
    """All papers and claims; `head` is the beginning of the documentation's page."""

    head: str
    papers: tuple[Paper, ...]
    claims_head: str
    claims: tuple[Claim, ...]

    @property
    def items(self) -> list[PaperItem]:
        """Return all items with the names of their papers."""
        return [item.model_copy(update={"paper": paper.title}) for paper in self.papers for item in paper.items]


def sweep_commands(sweep: str, seeds: int, cluster: str, layout: str) -> list[str]:
    """Return the commands that train and draw, or print, a sweep of configs/sweeps."""
    many = f" --seeds {seeds}" if seeds > 1 else ""
    show = f"--layout {layout}" if layout else f"--figure {sweep}.png"
    return [
        f"sparo launch train sweeps/{sweep}{many} --cluster {cluster}",
        f"sparo eval sweep sweeps/{sweep} {show}",
    ]


@lru_cache(1)
def read_index() -> Index:
    """Read the index."""
    # libyaml is five times as fast, and this file is long.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Index.model_validate(yaml.load(FILE.read_text(encoding="utf-8"), loader))


def find_items(words: Sequence[str]) -> list[PaperItem]:
    """Return the items whose paper and name contain all words.

    Raises:
        ConfigError: no item contains them.
    """
    items = read_index().items
    found = [item for item in items if _matches(item, words)]
    if not found:
        raise ConfigError(_no_match_message(items, words))
    return found


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
