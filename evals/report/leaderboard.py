"""Content of a leaderboard: the newest result of every checkpoint and task below a folder, with model size and training data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sparo_train.core.errors import DataError

from .grid import Cell, Grid
from .paper_tables import grid
from .results_file import Record, by_checkpoint, read_records

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A checkpoint; `records` has a record per column of the table, or None."""

    name: str
    parameters: int | None
    data: str
    cells: Sequence[Cell | None]
    records: Sequence[Record | None]


class Leaderboard(NamedTuple):
    """The table with an entry per row."""

    table: Grid
    entries: list[Entry]


def read_leaderboard(folder: Path, layout: str | None = None) -> Leaderboard:
    """Return the results of all `results.jsonl` below a folder.

    Raises:
        DataError: there are none, or one has another format.
        ConfigError: no such layout, or no result for it.
    """
    files = sorted(path for path in folder.rglob("results.jsonl") if path.is_file())
    if not files:
        raise DataError(f"{folder}: has no results.jsonl. Give the parent folder of runs that were scored.")
    # By run folder, so that names are those that other commands take.
    places = [path.parent.parent if path.parent.name == "evals" else path for path in files]
    newest: dict[tuple[str, str, str], Record] = {}
    for record in (record for place in places for record in _readable(place)):
        key = record.checkpoint, record.task, str(record.facts.get("limit"))
        known = newest.get(key)
        # Results of earlier versions have no time and count as older.
        if known is None or str(record.facts.get("time", "")) >= str(known.facts.get("time", "")):
            newest[key] = record
    records = list(newest.values())
    if not records:
        raise DataError(f"{folder}: has no readable results. Score the runs again.")
    table, by_name = grid(records, layout), by_checkpoint(records)
    entries = []
    for row in table.rows:
        found = by_name[row.name]
        facts = [record.facts for record in found.values()]
        parameters = next((f["parameters"] for f in facts if isinstance(f.get("parameters"), int)), None)
        data = next((str(f["trained_on"]) for f in facts if f.get("trained_on")), "")
        members = [found.get(column.task) for column in table.columns]
        entries.append(Entry(row.name, parameters, data, row.cells, members))
    return Leaderboard(table, entries)


def _readable(place: Path) -> list[Record]:
    """Return the results of a place; those of a damaged file are skipped with a warning, because others can still be shown."""
    try:
        return read_records([place])
    except DataError as error:
        logger.warning(f"skipped a results file: {error}")
        return []


def provenance(record: Record) -> list[tuple[str, str]]:
    """Return the facts that a score depends on, as (name, value)."""
    facts, result = record.facts, record.result
    checkpoint = facts.get("checkpoint", {})
    environment = facts.get("environment", {})
    low, high = result.interval
    rows = [
        ("metric", result.headline),
        ("n", f"{result.n:,}"),
        ("interval", f"{low:.4f} to {high:.4f}"),
        ("chance", f"{result.chance:.4f}"),
        ("data", result.data[:16]),
        ("weights", str(checkpoint.get("sha256", ""))[:16]),
        ("precision", str(facts.get("precision", ""))),
        ("sparo", str(facts.get("sparo", ""))),
        ("torch", str(environment.get("torch", ""))),
        ("seconds", str(facts.get("seconds", ""))),
        ("file", str(record.folder / "results.jsonl")),
        ("note", result.note),
    ]
    return [(name, value) for name, value in rows if value]
