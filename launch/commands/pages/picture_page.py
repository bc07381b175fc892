"""A page of pictures that lie beside it, with the run's last scores on the task that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment

from evals.report.results_file import whole_records
from evals.tasks.result import format_metric
from sparo_train.core.files import write_whole
from sparo_train.core.untrusted import escape_control_chars

from ... import views


class PageRow(NamedTuple):
    """A sample's key, and its pictures: file names beside the page, and what each shows."""

    key: str
    pictures: Sequence[tuple[str, str]]


def write_page(
    out: Path, checkpoint: str, task: str, title: str, summary: str, note: str, rows: Sequence[PageRow]
) -> Path:
    """Write OUT/report.html; returns its path."""
    template = (Path(views.__file__).parent / "pictures.html.jinja").read_text(encoding="utf-8")
    # Keys and names are others' texts, and the page is opened in a browser.
    page = Environment(autoescape=True).from_string(template)
    escaped_rows = [
        PageRow(escape_control_chars(row.key), [(name, escape_control_chars(alt)) for name, alt in row.pictures])
        for row in rows
    ]
    place = out / "report.html"
    write_whole(
        place,
        page.render(
            title=escape_control_chars(title),
            said=summary,
            note=note,
            rows=escaped_rows,
            scores=_scores(Path(checkpoint), task),
        ),
    )
    return place


def _scores(run: Path, task: str) -> list[tuple[str, str]]:
    """What the run itself was last scored with on this task, the whole of it; empty where it was not."""
    if not (run / "evals/results.jsonl").is_file():
        return []
    results = [record.result for record in whole_records(run) if record.task == task]
    rows = [
        (name, format_metric(name, value, unit=True))
        for result in results[-1:]
        for name, value in result.metrics.items()
    ]
    return [*rows, *(("n", str(result.n)) for result in results[-1:])]
