"""Progress and tables of `sparo data check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sparo_data.check import Report, check
from sparo_train.data.read.sources import SourceConfig

from .progress import Bar

_NAMED = 5
_KINDS = ("keys", "images", "captions")


def check_with_bar(urls: Sequence[str], config: SourceConfig, processes: int) -> Report:
    """`check` with a bar over shards."""
    with Bar() as bar:
        task = bar.start_task_named("checking shards", len(urls))
        return check(urls, config, processes, lambda done: bar.show(task, done, len(urls)))


def check_table(report: Report) -> Table:
    """Totals, and a row per shard that has something wrong."""
    table = Table(title=_title(report), title_justify="left")
    for column in ("shard", "samples", "broken", "reasons", "keys"):
        table.add_column(column)
    for shard in report.shards:
        if shard.bad or shard.damage:
            reasons = Counter(reason for _, reason in shard.bad)
            if shard.damage:
                reasons[shard.damage] = 1
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
        "duplicates": {name: getattr(report, name)._asdict() for name in _KINDS},
        "bad": {s.url: [list(pair) for pair in s.bad] for s in report.shards if s.bad},
        "damaged": {s.url: s.damage for s in report.shards if s.damage},
    }


def _title(report: Report) -> str:
    broken = ", ".join(f"{r}: {n}" for r, n in report.reasons().items()) or "nothing broken"
    lines = [f"{len(report.shards)} shards, {report.samples} samples; {broken}"]
    for name in _KINDS:
        found = getattr(report, name)
        example = found.examples[0] if found.examples else []
        such_as = ", e.g. " + " = ".join(f"{url}:{key}" for url, key in example[:2]) if example else ""
        lines.append(f"duplicate {name}: {found.copies}{such_as}")
    return "\n".join(lines)
