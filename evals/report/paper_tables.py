"""Tables of results: which metric of which task stands in which column, and the cells as terminal, Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

import yaml

from sparo_train.core.errors import ConfigError, did_you_mean

from ..tasks.result import LOWER_IS_BETTER, Result, is_share, shown
from .paper_layouts import LAYOUTS, TITLES, Column
from .results_file import Record, by_checkpoint

MARK = "†"


class Cell(NamedTuple):
    """A score with its 95 % interval where there is one; `odd`: of data that is not what the task's name says."""

    value: float
    low: float | None = None
    high: float | None = None
    odd: bool = False
    metric: str = ""

    @property
    def number(self) -> str:
        """Per cent or with its unit, marked where the data is odd."""
        return f"{shown(self.metric, self.value, unit=True)}{MARK if self.odd else ''}"

    @property
    def span(self) -> str:
        """The interval; empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{shown(self.metric, self.low)}–{shown(self.metric, self.high)}"


class Row(NamedTuple):
    """`paper`: as printed in the SPARO paper, not ours."""

    name: str
    cells: list[Cell | None]
    paper: bool = False


class Grid(NamedTuple):
    """A table before it is drawn.  notes: what the marked cells stand for, a line each.  spans: what stands in brackets.
    unranked: tasks of whose scores none is the best, since they are not of the same samples.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str]
    spans: str = "95 % intervals"
    unranked: frozenset[str] = frozenset()

    @property
    def unit(self) -> str:
        """Of its cells."""
        metrics = {cell.metric for row in self.rows for cell in row.cells if cell is not None}
        return "per cent" if all(map(is_share, metrics)) else "per cent where no unit stands"


def grid(records: Sequence[Record], layout: str | None, paper: Sequence[str] = ()) -> Grid:
    """Checkpoints as rows.

    Args:
        layout: a key of `LAYOUTS`; None: every task's headline.
        paper: training sets (`CC15M`, …) whose printed rows are added below, or `all`; only with a layout.

    Raises:
        ConfigError: no such layout, or printed rows without one.
    """
    table = by_checkpoint(records)
    if layout is None and paper:
        raise ConfigError(f"--paper {','.join(paper)}: the paper's rows need a --layout: {', '.join(LAYOUTS)}")
    if layout is None:
        tasks = dict.fromkeys(record.task for record in records)
        # In the order in which they were scored, as the recipe has them.
        columns = [Column("", task, task, None) for task in tasks]
    elif layout in LAYOUTS:
        columns = LAYOUTS[layout]
    else:
        raise ConfigError(f"--layout {layout}: {did_you_mean(layout, LAYOUTS)}")
    rows = [
        Row(name, [_cell(found[c.task].result, c.metric) if c.task in found else None for c in columns])
        for name, found in table.items()
    ]
    if layout is not None:
        rows += _printed(layout, paper)
    tasks = {column.task for column in columns}
    odd = [(name, t, record.result.note) for name, found in table.items() for t, record in found.items() if t in tasks]
    notes = [f"{MARK} {name}: {task} is not the listed data: {note}" for name, task, note in odd if note]
    notes += [f"{name}: {said}" for name, found in table.items() if (said := _mixed(list(found.values())))]
    of_several = {t: said for t in tasks if (said := several_data([f[t] for f in table.values() if t in f]))}
    notes += of_several.values()
    notes = [" ".join(note.split()) for note in notes]  # a name with a line feed would end a comment of LaTeX's
    return Grid(TITLES.get(layout or "", "Results"), columns, rows, notes, unranked=frozenset(of_several))


def several_data(records: Sequence[Record]) -> str:
    """That results of one task are not of the same samples, in words; empty where they are."""
    # What a plug-in scored may have no identity: then at least its size has to be the same.
    if len({record.dataset or record.result.n for record in records}) < 2:
        return ""
    sizes = sorted({record.result.n for record in records})
    told = f"n {', '.join(map(str, sizes))}" if len(sizes) > 1 else f"n {sizes[0]} each"
    return f"{records[0].task}: not of the same samples in all rows ({told}): another set, or a part of it; no best is marked"


def _mixed(records: Sequence[Record]) -> str:
    """What records of one name do not have in common, in words: a file that was written anew, another precision."""
    held = [r.facts for r in records if r.facts.get("checkpoint")]
    facts = {
        "weights": {f["checkpoint"].get("sha256") for f in held},
        "precision": {f.get("precision") for f in held},
        "storage": {f.get("storage") for f in held},
    }
    odd = [name for name, values in facts.items() if len(values) > 1]
    return f"its scores are of several kinds of {' and '.join(odd)}; score it again on all of them" if odd else ""


def _cell(result: Result, metric: str | None) -> Cell | None:
    name = metric or result.headline
    if name not in result.metrics:
        return None
    # The headline always has an interval; of another metric only what its task computed.
    low, high = result.interval if name == result.headline else result.intervals.get(name, (None, None))
    return Cell(result.metrics[name], low, high, bool(result.note), name)


def _printed(layout: str, wanted: Sequence[str]) -> list[Row]:
    text = (resources.files("evals.report") / "paper.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)[layout]
    return [
        Row(f"paper: {data} {model}", [None if v is None else Cell(v) for v in values], True)
        for data, model, *values in rows
        if "all" in wanted or data in wanted
    ]


def markdown(table: Grid, transpose: bool = False) -> str:
    """Per cent with intervals; the best of our rows in bold."""
    heads, names, cells = _drawn(table, transpose, _text, ("**", "**"))
    lines = ["| " + " | ".join(["", *heads]) + " |", "|---" + "|---:" * len(heads) + "|"]
    lines += ["| " + " | ".join([name, *row]) + " |" for name, row in zip(names, cells, strict=True)]
    lines += [f"\n{note}" for note in table.notes]
    return f"{table.title}, {table.unit}, {table.spans}\n\n" + "\n".join(lines) + "\n"


def latex(table: Grid, transpose: bool = False) -> str:
    """A booktabs tabular without intervals; the best of our rows in bold."""
    number = lambda cell: "--" if cell is None else cell.number.replace(MARK, "$^\\dagger$")  # noqa: E731
    heads, names, cells = _drawn(table, transpose, number, ("\\textbf{", "}"), _escaped)
    top = [" & ".join(["", *heads])]
    if not transpose:
        groups = [(group, len(list(found))) for group, found in itertools.groupby(c.group for c in table.columns)]
        spans = " & ".join(f"\\multicolumn{{{n}}}{{c}}{{{_escaped(group)}}}" for group, n in groups)
        top = [f" & {spans}", " & ".join(["", *(_escaped(c.label) for c in table.columns)])]
    body = [" & ".join([name, *row]) for name, row in zip(names, cells, strict=True)]
    # Printed rows stand below a line of their own, so that nobody takes them for measured ones.
    ruled = next((i for i, row in enumerate(table.rows) if row.paper and not transpose), len(body))
    lines = [*(f"{line} \\\\" for line in top), "\\midrule", *(f"{line} \\\\" for line in body[:ruled])]
    if ruled < len(body):
        lines += ["\\midrule", *(f"{line} \\\\" for line in body[ruled:])]
    begin = [
        f"% {table.title}, {table.unit}",
        *(f"% {note}" for note in table.notes),
        f"\\begin{{tabular}}{{l{'r' * len(heads)}}}",
        "\\toprule",
    ]
    return "\n".join([*begin, *lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def as_csv(table: Grid, transpose: bool = False) -> str:
    """Fractions in full precision, each with its interval's ends in columns (or rows) of their own."""
    # By task, not by heading: a program reads this one, and two columns may be labelled alike.
    names = [f"{c.task} {c.metric or 'headline'}" for c in table.columns]
    ends = ["", " low", " high", *([" odd"] if table.notes else [])]
    lines = [["checkpoint", *(f"{name}{end}" for name in names for end in ends)]]
    for row in table.rows:
        cells = [(cell or (None,) * 4)[: len(ends)] for cell in row.cells]
        lines.append([row.name, *("" if v is None else str(v) for cell in cells for v in cell)])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(zip(*lines, strict=True) if transpose else lines)
    return out.getvalue()


def _drawn(
    table: Grid,
    transpose: bool,
    text: Callable[[Cell | None], str],
    bold: tuple[str, str],
    escape: Callable[[str], str] = lambda name: " ".join(name.split()).replace("|", "\\|"),
) -> tuple[list[str], list[str], list[list[str]]]:
    """Heads of the columns, names of the rows, and the cells between them."""
    best, cells = _best(table), []
    for row in table.rows:
        marked = [
            not row.paper and cell is not None and cell.value == b for cell, b in zip(row.cells, best, strict=True)
        ]
        cells.append([bold[0] + text(c) + bold[1] if m else text(c) for c, m in zip(row.cells, marked, strict=True)])
    heads, names = [escape(c.heading) for c in table.columns], [escape(row.name) for row in table.rows]
    return (names, heads, [list(row) for row in zip(*cells, strict=True)]) if transpose else (heads, names, cells)


def _best(table: Grid) -> list[float | None]:
    """Of each column, among our own rows where there are several."""
    own = [row for row in table.rows if not row.paper]
    if len(own) < 2:
        return [None] * len(table.columns)
    columns = [[row.cells[i] for row in own] for i in range(len(table.columns))]
    best: list[float | None] = []
    for column in columns:
        cells = [c for c in column if c is not None]
        metrics = {c.metric for c in cells}
        choose = min if metrics <= LOWER_IS_BETTER else max
        # Of two metrics, or of two sets, none is the better.
        ranked = len(metrics) == 1 and table.columns[len(best)].task not in table.unranked
        best.append(choose(c.value for c in cells) if ranked else None)
    return best


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return cell.number + (f" ({cell.span})" if cell.span else "")


def _escaped(text: str) -> str:
    text = " ".join(text.split())
    for sign in "\\&%$#_{}":
        text = text.replace(sign, "\\textbackslash " if sign == "\\" else "\\" + sign)
    return text.replace("~", "\\textasciitilde ").replace("^", "\\textasciicircum ")
