"""Progress and report of `sparo data check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparo_data.check import Report, check
from sparo_train.data.read.decoding import PixelRange
from sparo_train.data.read.sources import SourceConfig

from .progress import Bar

_MAX_KEYS = 5
_KINDS = ("keys", "images", "captions")


def check_with_bar(urls: Sequence[str], config: SourceConfig, processes: int, pixel_range: PixelRange) -> Report:
    """`check` with a bar over shards."""
    with Bar() as bar:
        task = bar.start_task_named("checking shards", len(urls))
        return check(urls, config, processes, lambda done: bar.show(task, done, len(urls)), pixel_range)


def check_lines(report: Report) -> list[str]:
    """Totals, and behind them each shard that has something wrong, its name whole."""
    lines = _totals(report)
    for shard in report.shards:
        if not shard.bad and not shard.damage:
            continue
        lines.append(f"{shard.url}: {shard.samples} samples, {len(shard.bad)} broken")
        if shard.damage:
            lines.append(f"  {shard.damage}")
        by_reason: dict[str, list[str]] = {}
        for key, reason in shard.bad:
            detail = shard.details.get(key)
            by_reason.setdefault(reason, []).append(f"{key}: {detail}" if detail else key)
        for reason, keys in by_reason.items():
            more = " …" if len(keys) > _MAX_KEYS else ""
            lines.append(f"  {reason}: {len(keys)} ({', '.join(keys[:_MAX_KEYS])}{more})")
    return lines


def check_facts(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "shards": len(report.shards),
        "samples": report.samples,
        "broken": report.reasons(),
        "notes": report.notes(),
        "duplicates": {name: getattr(report, name)._asdict() for name in _KINDS},
        "bad": {s.url: [list(pair) for pair in s.bad] for s in report.shards if s.bad},
        "damaged": {s.url: s.damage for s in report.shards if s.damage},
    }


def _totals(report: Report) -> list[str]:
    broken = ", ".join(f"{r}: {n}" for r, n in report.reasons().items()) or "nothing broken"
    lines = [f"{len(report.shards)} shards, {report.samples} samples; {broken}"]
    if notes := report.notes():
        lines.append("usable, but unusual: " + ", ".join(f"{n} {note}" for note, n in notes.items()))
    for name in _KINDS:
        duplicates = getattr(report, name)
        example = duplicates.examples[0] if duplicates.examples else []
        examples_text = ", e.g. " + " = ".join(f"{url}:{key}" for url, key in example[:2]) if example else ""
        lines.append(f"duplicate {name}: {duplicates.copies}{examples_text}")
    # The commonest of all mistakes, with what mends it.
    if report.samples and report.reasons().get("missing caption") == report.samples:
        lines.append("no sample has a caption; where pictures alone are wanted: --caption-key ''")
    return lines
