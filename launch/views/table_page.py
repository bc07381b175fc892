"""HTML pages of results: one table, and the leaderboard with filters, sorting, and the provenance of each score."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from evals.report.grid import Cell, Grid
from evals.report.leaderboard import Leaderboard, provenance

from .html import render

_SCRIPT = Path(__file__).parent / "leaderboard.js"


class _Text(NamedTuple):
    text: str
    value: float | None = None


class _Score(NamedTuple):
    cell: Cell | None
    best: bool
    provenance: Sequence[tuple[str, str]] = ()


class _Line(NamedTuple):
    name: str
    texts: Sequence[_Text]
    cells: Sequence[_Score]
    parameters: int | None = None
    data: str = ""


def table_page(table: Grid, transpose: bool = False) -> str:
    """Return a table as a page."""
    heads = [*table.heads, *(column.heading for column in table.columns)]
    best = table.best or (None,) * len(table.columns)
    lines = [
        _Line(
            row.name,
            [_Text(text) for text in row.readout_cells],
            [_Score(cell, number == b) for cell, b in zip(row.cells, best, strict=True)],
        )
        for number, row in enumerate(table.rows)
    ]
    if transpose:
        names, columns = [line.name for line in lines], range(len(table.columns))
        lines = [_Line(table.columns[i].heading, [], [line.cells[i] for line in lines]) for i in columns]
        heads = names
    along = "row" if transpose else "column"
    return render("table.html.jinja", table=table, heads=heads, rows=lines, along=along)


def leaderboard_page(board: Leaderboard) -> str:
    """Return a leaderboard as a page that needs no server."""
    table = board.table
    best = table.best or (None,) * len(table.columns)
    lines = []
    for number, entry in enumerate(board.entries):
        size = "–" if entry.parameters is None else f"{entry.parameters / 1e6:.1f}M"
        scores = [
            _Score(cell, number == b, () if record is None else provenance(record))
            for cell, record, b in zip(entry.cells, entry.records, best, strict=True)
        ]
        texts = [_Text(size, entry.parameters), _Text(entry.data or "–")]
        lines.append(_Line(entry.name, texts, scores, entry.parameters, entry.data))
    heads = ["parameters", "trained on", *(column.heading for column in table.columns)]
    script = _SCRIPT.read_text(encoding="utf-8")
    values: dict[str, Any] = {
        "along": "column",
        "script": Markup(script),  # our own file, not data
        "script_hash": f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        "data": sorted({entry.data for entry in board.entries if entry.data}),
    }
    return render("table.html.jinja", table=table, heads=heads, rows=lines, **values)
