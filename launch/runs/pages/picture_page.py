"""A page of pictures that lie beside it, with the run's last scores on the task that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment

from evals.report.results_file import whole_records
from evals.tasks.result import shown
from sparo_train.core.files import write_whole
from sparo_train.core.untrusted import shown as harmless

from ... import views


class PageRow(NamedTuple):
    """A sample's key, and its pictures: file names beside the page, and what each shows."""

    key: str
    pictures: Sequence[tuple[str, str]]


def write_page(
    out: Path, checkpoint: str, task: str, title: str, said: str, note: str, rows: Sequence[PageRow]
) -> Path:
    """Write OUT/report.html; returns its path."""
    template = (Path(views.__file__).parent / "pictures.html.jinja").read_text(encoding="utf-8")
    # Keys and names are others' texts, and the page is opened in a browser.
    page = Environment(autoescape=True).from_string(template)
    told = [PageRow(harmless(row.key), [(name, harmless(alt)) for name, alt in row.pictures]) for row in rows]
    place = out / "report.html"
    write_whole(
        place,
        page.render(title=harmless(title), said=said, note=note, rows=told, scores=_scores(Path(checkpoint), task)),
    )
    return place


def _scores(run: Path, task: str) -> list[tuple[str, str]]:
    """What the run itself was last scored with on this task, the whole of it; empty where it was not."""
    if not (run / "evals/results.jsonl").is_file():
        return []
    found = [record.result for record in whole_records(run) if record.task == task]
    rows = [(name, shown(name, value, unit=True)) for result in found[-1:] for name, value in result.metrics.items()]
    return [*rows, *(("n", str(result.n)) for result in found[-1:])]
