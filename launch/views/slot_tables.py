"""Tables of `sparo slots`: scores of units, effects of a selection, the paper's Tables 4 and 5, quality of slots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from evals.slots.mask_study import MaskRow, relative_change
from evals.slots.naming import Naming
from evals.slots.quality_measures import Quality
from evals.slots.selection_report import ChoiceReport, FourColumn, Score
from sparo_train.core.files import escape_control_chars

from .terminal import out


def report_table(title: str, reports: Sequence[ChoiceReport], k: int, of: int, units: str) -> Table:
    """Return a row per task: all units, the selection, equally many random units, the worst, and the paired gain."""
    table = _table(title)
    for head in ("task", f"all {of}", f"{k} chosen", f"{k} random", f"{k} worst", "gain"):
        table.add_column(head, justify="left" if head == "task" else "right")
    for r in reports:
        at = k - 1
        control = f"{_percent(r.random_mean[at])}\n{_percent(r.random_low[at])}–{_percent(r.random_high[at])}"
        name = f"{r.task}\n{r.share}, n = {r.n}"
        table.add_row(name, _score(r.whole), _score(r.chosen), control, _score(r.bottom), _format_signed(r.gain))
    if reports:
        draw_counts = " or ".join(map(str, sorted({r.draws for r in reports})))
        table.caption = (
            f"per cent, below it 95 % intervals (random {units}: the middle 95 % of {draw_counts} draws); "
            "gain: selected minus all, paired"
        )
    return table


def units_table(
    title: str, columns: Mapping[str, Sequence[float]], numbers: Sequence[int], names: Mapping[int, str]
) -> Table:
    """Return a row per unit: its accuracy alone and that of all others, task by task."""
    table = _table(title)
    table.add_column("unit", justify="right")
    for head in columns:
        table.add_column(head, justify="right", overflow="fold")
    if names:
        table.add_column("name")
    for number in numbers:
        row = [str(number), *(_percent(values[number]) for values in columns.values())]
        table.add_row(*row, *([names.get(number, "")] if names else []))
    return table


def four_table(columns: Sequence[FourColumn]) -> Table:
    """Return Table 4's layout: kinds of pairs as rows; for each checkpoint all slots, the selection, and the controls."""
    table = _table("Selection by one task, scored on another (layout of Table 4)")
    table.add_column("kind")
    for column in columns:
        for head in (
            f"{column.label}\nslots: 100 %",
            column.share,
            f"{column.share}\nrandom",
            f"{column.share}\nworst",
        ):
            table.add_column(head, justify="right")
    for i, kind in enumerate(columns[0].kinds):
        cells = []
        for c in columns:
            cells += [_score(c.whole[i]), _score(c.chosen[i]), _percent(c.random[i]), _score(c.bottom[i])]
        table.add_row(kind, *cells, style="bold" if kind == "Average" else None)
    return table


def five_table(rows: Sequence[MaskRow]) -> Table:
    """Return Table 5: pairs and every task without and with each mask, and the relative change.

    It has the paper's layout if the terminal is wide enough, otherwise a line per task.
    """
    table = _table("Masks trained on pairs, scored elsewhere (layout of Table 5)")
    tasks = list(rows[0].tasks)
    wide = out.width >= 60 + 34 * len(tasks)
    for head in ("(parts, size)", "model", "shape", *(["pairs\ninitial", "masked"] if wide else ["scored on", "initial", "masked", "change"])):  # fmt: skip
        table.add_column(head, justify="left" if head in ("model", "scored on") else "right")
    for task in tasks if wide else ():
        for head in (f"{task}\ninitial", "masked", "relative\nchange"):
            table.add_column(head, justify="right")
    for row in rows:
        first = [f"({row.parts[0]}, {row.parts[1]})", row.label, str(row.shape).replace(",)", ")")]
        pairs = [f"{row.pairs[0]:.3f}", _spread(row.pairs[1])]
        cells = {task: _five_cells(row, task) for task in tasks}
        if wide:
            table.add_row(*first, *pairs, *(cell for task in tasks for cell in cells[task]))
            continue
        table.add_row(*first, "pairs", *pairs, "")
        for task in tasks:
            table.add_row("", "", "", task, *cells[task])
    pairs_note = (
        "pairs that the masks were not trained on" if rows[0].held_out else "the pairs that the masks were trained on"
    )
    table.caption = (
        f"pairs: {pairs_note}; change: relative, divided by that of the pairs (- if the mask changed nothing there); means over "
        f"{len(rows[0].pairs[1])} seed(s) of the mask, smallest to largest below"
    )
    return table


def _five_cells(row: MaskRow, task: str) -> list[str]:
    initial, masked = row.tasks[task]
    changes = [relative_change((row.pairs[0], p), (initial, m)) for p, m in zip(row.pairs[1], masked, strict=True)]
    finite_changes = [change for change in changes if math.isfinite(change)]
    return [f"{initial:.3f}", _spread(masked), _spread(finite_changes, "+.2f") if finite_changes else "-"]


def quality_table(rows: Sequence[Quality], by: str | None) -> Table:
    """Return a row per checkpoint."""
    table = _table(f"Quality of slots, n = {rows[0].n} images")
    heads = ("model", "units", "in effect", "redundancy", "sharpness", "meaning", "best unit")
    for head in heads:
        table.add_column(head, justify="left" if head == "model" else "right")
    for r in rows:
        best = max(r.meaning_of_units, default=None)
        cells = [r.effective, r.redundancy, r.image_sharpness, r.meaning, best]
        forms = (".1f", ".3f", ".3f", ".3f", ".3f")
        table.add_row(
            r.label, str(r.units), *("-" if v is None else f"{v:{f}}" for v, f in zip(cells, forms, strict=True))
        )
    alike = rows[0].alike
    meaning_note = (
        f"; reference {by}, and {alike:.3f} for a neuron that fires equally for all images"
        if alike is not None
        else "; --reference CHECKPOINT adds it"
    )
    table.caption = (
        "in effect: exp of the entropy of the eigenvalues of the slots' similarity; redundancy: mean similarity (linear CKA) of two "
        f"slots; sharpness: 1 minus the entropy of image attention, median slot; meaning: MonoSemanticity score{meaning_note}"
    )
    return table


def names_table(title: str, naming: Naming) -> Table:
    """Return a row per slot: its names with their AUC on held-out images, and the AUC of other slots' names."""
    table = _table(title)
    for head, justify in (("slot", "right"), ("names", "left"), ("AUC, held out", "left"), ("other names", "right")):
        table.add_column(head, justify=justify)  # pyright: ignore[reportArgumentType]
    for one in naming.slots:
        passing = set(one.passing)
        names = ", ".join(test.name if test.name in passing else f"({test.name})" for test in one.tests)
        tests = ", ".join(f"{test.auc:.2f} ({test.low:.2f}–{test.high:.2f})" for test in one.tests[:1])
        shuffled = "–" if one.shuffled is None else f"{one.shuffled:.2f}"
        table.add_row(str(one.slot), escape_control_chars(names), tests, shuffled)
    p = "p < 0.001" if naming.p < 0.001 else f"p = {naming.p:.3f}"
    table.caption = (
        f"{naming.names} names, {naming.images} images: one half chose the names, the other half tested them. AUC of the best name, "
        f"mean over slots: {naming.auc:.2f}; of the same names on other slots: {naming.shuffled:.2f} ({p}, 1,000 random "
        "assignments). In parentheses: names that do not exceed the names of other slots."
    )
    return table


def matches_table(title: str, rows: Sequence[Mapping[str, Any]], with_rest: bool) -> Table:
    """Return a row per match of a search: its key, its caption, and its cosines in the chosen slots and in the others."""
    table = _table(escape_control_chars(title))
    for head in ("image", "caption", "alike", *(["other slots"] if with_rest else [])):
        table.add_column(head, justify="left" if head in ("image", "caption") else "right")
    for row in rows:
        rest = [f"{row['rest']:.2f}"] if with_rest else []
        table.add_row(row["key"], row["caption"], f"{row['alike']:.2f}", *rest)
    return table


def show(table: Table) -> None:
    """Print a table to stdout."""
    out.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _spread(values: Sequence[float], form: str = ".3f") -> str:
    mean = f"{sum(values) / len(values):{form}}"
    return mean if len(values) == 1 else f"{mean}\n{min(values):{form}}–{max(values):{form}}"


def _score(score: Score) -> str:
    return f"{_percent(score.value)}\n{_percent(score.low)}–{_percent(score.high)}"


def _format_signed(score: Score) -> str:
    return f"{100 * score.value:+.1f}\n{100 * score.low:+.1f}–{100 * score.high:+.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
