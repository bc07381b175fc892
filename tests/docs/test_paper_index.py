"""Check that the index has every table and figure of the five papers with a command that resolves, and that claims are complete and have records."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from docs.generate import KeyPages
from launch.cli.main import app
from launch.jobs.sweep import expand, read_sweep
from launch.papers.index import find_items, read_index
from launch.papers.listing import RECORDS
from launch.papers.sweep_record import read_record
from launch.recipes import find_recipe, load_run
from tests.docs.test_docs import ROOT
from tests.docs.test_site import check_command

INDEX = read_index()
SPARO, SYMMETRY, TRANSPORT, INVERTED, PSB = (paper.title for paper in INDEX.papers)
TEXTS = {
    SPARO: "sparo", SYMMETRY: "spatial-symmetry-slot-attention", TRANSPORT: "slot-attention-optimal-transport",
    INVERTED: "inverted-attention-transformers", PSB: "parallel-spatiotemporal-binder",
}  # fmt: skip
TABLES = {
    SPARO: {*map(str, range(1, 7)), "B.1", "B.2", "C.1", "C.2", "C.3"}, SYMMETRY: set(map(str, range(1, 9))), TRANSPORT: {"1"},
    INVERTED: {"1", "2"}, PSB: set(map(str, range(1, 13))),
}  # fmt: skip
FIGURES = {
    SPARO: {"1", "2", "3", "4", "B.1"}, SYMMETRY: set(map(str, range(1, 7))), TRANSPORT: set(), INVERTED: set(map(str, range(1, 10))),
    PSB: set(map(str, range(1, 18))),
}  # fmt: skip
# rows of every table with results; figures print no numbers
ROWS = {
    SPARO: {
        "Table 1": 12, "Table 2": 12, "Table 3, left": 12, "Table 3, right": 2, "Table 4": 4, "Table 5": 8, "Table 6": 12,
        "Table B.1": 12, "Table B.2": 36,
    },
    SYMMETRY: {"Table 1": 10, "Table 2": 3, "Table 3": 3}, TRANSPORT: {"Table 1": 10}, INVERTED: {"Table 1": 5, "Table 2": 6},
    PSB: {"Table 1": 4},
}  # fmt: skip


def numbers(names):
    """Expand `Tables 3 to 5` and `Fig. 1, 4 and B.1` to numbers."""
    found = set()
    for name in names:
        words = re.findall(r"[A-C]\.\d+|\d+|to", name)
        for place, word in enumerate(words):
            if word == "to":
                found |= set(map(str, range(int(words[place - 1]), int(words[place + 1]))))
            else:
                found.add(word)
    return found


@pytest.mark.parametrize("paper", INDEX.papers, ids=lambda paper: TEXTS[paper.title])
def test_the_index_has_every_table_and_figure(paper):
    names = [item.name for item in paper.items]
    assert numbers(name for name in names if name.startswith("Table")) == TABLES[paper.title]
    assert numbers(name for name in names if name.startswith("Fig")) == FIGURES[paper.title]
    assert {item.name: len(item.rows) for item in paper.items if item.rows} == ROWS[paper.title]
    for item in paper.items:
        assert all(len(row["paper"]) == len(item.columns) for row in item.rows), item.name
        assert find_items([*paper.title.split()[:1], *re.findall(r"[\w.]+", item.name)])[0].name == item.name
    text = ROOT.parent / "shared/papers" / f"{TEXTS[paper.title]}.txt"
    if text.exists():  # captions of the paper's text
        found = re.findall(
            r"^\**(Table|Figure|Fig\.) ?((?:[A-C]\.)?\d+)[.:]", text.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {number for kind, number in found if kind == "Table"} <= TABLES[paper.title]
        assert {number for kind, number in found if kind != "Table"} <= FIGURES[paper.title]


@pytest.mark.parametrize("item", INDEX.items, ids=lambda item: f"{TEXTS[item.paper]}-{item.name}")
def test_every_item_has_commands_that_resolve(item, tmp_path, monkeypatch):
    commands = [*item.commands, *item.small_commands]
    assert bool(commands) != bool(item.no_command), "either commands, or a reason why nothing is to be run"
    assert not (item.sweep and not item.cost) and not (item.small and not item.small_cost)
    monkeypatch.chdir(tmp_path)
    root = typer.main.get_command(app)
    for command in commands:
        words = shlex.split(command)
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), command
            continue
        check_command(root, words[1:], command)
        for word in words:
            if word.startswith("sweeps/"):
                assert expand(find_recipe(Path(word)), [])[1], command
    for size in filter(None, (item.sweep, item.small)):
        sweep = read_sweep(find_recipe(Path(f"sweeps/{size}")))
        assert size != item.small or sweep.data, f"{size}: names no commands for its data"
        for made in (*sweep.data, *(measure.command for measure in sweep.measures.values())):
            check_command(root, shlex.split(made)[1:], made)


def test_recipes_of_rows_resolve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes = {row["recipe"] for item in INDEX.items for row in item.rows if "recipe" in row}
    assert len(recipes) > 80
    for recipe in recipes:
        name, *overrides = shlex.split(recipe)
        load_run(name, overrides)
    for paper in INDEX.papers:
        for default in paper.defaults:
            key = default["key"]
            assert key.rpartition(".")[2] in (ROOT / "docs/reference/keys").joinpath("index.md").read_text() or any(
                f".{key.rpartition('.')[2]}`" in page for page in KeyPages().pages().values()
            ), key


@pytest.mark.parametrize("claim", INDEX.claims, ids=lambda claim: str(claim.number))
def test_claims_name_items_and_rows_that_exist(claim):
    known = {f"{item.paper}: {item.name}" for item in INDEX.items}
    assert set(claim.items) <= known and claim.seeds >= 5
    sweep = read_sweep(find_recipe(Path(f"sweeps/{claim.sweep}")))
    rows = {name for test in claim.tests for name in (test.row, test.than) if name} | {c.row for c in claim.controls}
    assert rows <= set(sweep.runs)
    path = ROOT / "docs" / RECORDS / f"{claim.sweep}.json"
    if path.exists():
        record = read_record(path)
        assert {row.name for row in record.rows} == set(sweep.runs)
        scores = {test.score for test in claim.tests} | {control.score for control in claim.controls}
        assert scores <= {score for row in record.rows for run in row.runs for score in run.scores}
