"""Progress and tables of `sparo data check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sparo_train.data.check import Report, check
from sparo_train.data.sources import SourceConfig

from .making import bar

_NAMED = 5


def check_with_bar(urls: Sequence[str], config: SourceConfig, processes: int) -> Report:
    """`check` with a bar over shards."""
    with bar() as progress:
        task = progress.add_task("checking shards", total=len(urls))
        return check(urls, config, processes, lambda done: progress.update(task, completed=done))


def check_table(report: Report) -> Table:
    """Totals, and a row per shard that has something wrong."""
    table = Table(title=_title(report), title_justify="left")
    for column in ("shard", "samples", "broken", "reasons", "keys"):
        table.add_column(column)
    for shard in report.shards:
        if shard.bad or not shard.intact:
            reasons = Counter(reason for _, reason in shard.bad)
            if not shard.intact:
                reasons["truncated tar"] = 1
            keys = ", ".join(key for key, _ in shard.bad[:_NAMED]) + (" …" if len(shard.bad) > _NAMED else "")
            table.add_row(
                shard.url,
                str(shard.samples),
                str(len(shard.bad)),
                ", ".join(f"{r}: {n}" for r, n in reasons.items()),
                keys,
            )
    return table


def check_facts(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "shards": len(report.shards),
        "samples": report.samples,
        "broken": report.reasons(),
        "duplicates": {
            "keys": report.duplicate_keys,
            "images": report.duplicate_images,
            "captions": report.duplicate_captions,
        },
        "bad": {s.url: [list(pair) for pair in s.bad] for s in report.shards if s.bad},
        "truncated": [s.url for s in report.shards if not s.intact],
    }


def _title(report: Report) -> str:
    broken = ", ".join(f"{r}: {n}" for r, n in report.reasons().items()) or "nothing broken"
    return (
        f"{len(report.shards)} shards, {report.samples} samples; {broken}; duplicates: "
        f"{report.duplicate_keys} keys, {report.duplicate_images} images, {report.duplicate_captions} captions"
    )
