"""Results as text for other programs: Markdown, CSV, LaTeX, and clip-benchmark's JSON files."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparo_train.core.files import write_whole

from ..tasks.result import Result
from .grid import BETTER, MARK, WORSE, Cell, Grid
from .results_file import Record

_TASKS = {
    "zeroshot": "zeroshot_classification",
    "retrieval": "zeroshot_retrieval",
    "probe": "linear_probe",
    "pairs": "image_caption_selection",
}


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write one file per record and data set (SugarCrepe: per split), named as in clip-benchmark.

    k-NN and DINO's probe have no counterpart there and are skipped.
    """
    written = []
    for record in records:
        for dataset, metrics in _parts(record):
            task = _TASKS[record.result.task]
            # Paths contain slashes, which file names cannot.
            pretrained = re.sub(r"[^\w.-]+", "_", record.checkpoint).strip("_")
            content: dict[str, Any] = {
                "dataset": dataset, "model": "sparo", "pretrained": record.checkpoint, "task": task,
                "metrics": metrics, "language": "en",
            }  # fmt: skip
            name = f"{dataset.replace('/', '-')}_{pretrained}_sparo_en_{task}.json"
            written.append(write_whole(folder / name, json.dumps(content)))
    return written


def _parts(record: Record) -> list[tuple[str, dict[str, float]]]:
    result, name = record.result, record.task.removesuffix(":probe")
    if result.task == "zeroshot":
        if "mean_average_precision" in result.metrics:
            return [(name, dict(result.metrics))]
        # clip-benchmark always writes acc5, as NaN with fewer classes; its table needs the column.
        return [(name, {"acc5": float("nan"), **result.metrics})]
    if result.task == "retrieval":
        return [(name, _retrieval(result))]
    if result.task == "probe":
        metrics = {f"lp_{k}": v for k, v in {"acc5": float("nan"), **result.metrics}.items()}
        return [(name, {**metrics, **{k: result.options[k] for k in ("weight_decay", "epochs", "seed", "fewshot_k")}})]
    if result.task == "pairs":
        # One file per split, because clip-benchmark scores SugarCrepe's splits as separate sets.
        kinds = [k for k in result.metrics if k not in ("macro", "micro", "order_only", "blind")]
        return [
            (f"{name}/{k}", {"image_acc": 1.0, "text_acc": result.metrics[k], "acc": result.metrics[k]}) for k in kinds
        ]
    return []


def _retrieval(result: Result) -> dict[str, float]:
    names = {"image_R@": "image_retrieval_recall@", "text_R@": "text_retrieval_recall@"}
    return {
        theirs + key.removeprefix(ours): value
        for ours, theirs in names.items()
        for key, value in result.metrics.items()
        if key.startswith(ours)
    }


def markdown(table: Grid, transpose: bool = False) -> str:
    """Return Markdown, per cent with intervals; the best of our rows is bold if it is significantly better than all others."""
    heads, names, cells = _format_cells(table, transpose, _text, ("**", "**"))
    lines = ["| " + " | ".join(["", *heads]) + " |", "|---" + "|---:" * len(heads) + "|"]
    lines += ["| " + " | ".join([name, *row]) + " |" for name, row in zip(names, cells, strict=True)]
    lines += [f"\n{note}" for note in table.notes]
    return f"{table.title}, {table.unit}, {table.spans}\n\n" + "\n".join(lines) + "\n"


def latex(table: Grid, transpose: bool = False) -> str:
    """Return a booktabs tabular without intervals; the best of our rows is bold if it is significantly better than all others.

    Neither tabulate nor pandas writes headings that span columns together with bold cells and a rule between measured and printed rows.
    """
    number = lambda cell: "--" if cell is None else _latex_number(cell)  # noqa: E731
    heads, names, cells = _format_cells(table, transpose, number, ("\\textbf{", "}"), _escape)
    top = [" & ".join(["", *heads])]
    if not transpose:
        groups = [(group, len(list(members))) for group, members in itertools.groupby(c.group for c in table.columns)]
        groups = [*((("", len(table.heads)),) if table.heads else ()), *groups]
        spans = " & ".join(f"\\multicolumn{{{n}}}{{c}}{{{_escape(group)}}}" for group, n in groups)
        labels = [*table.heads, *(c.label for c in table.columns)]
        top = [f" & {spans}", " & ".join(["", *map(_escape, labels)])]
    body = [" & ".join([name, *row]) for name, row in zip(names, cells, strict=True)]
    # Printed rows are below a rule, so that they are not mistaken for measured ones.
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


def _latex_number(cell: Cell) -> str:
    text = cell.number.replace(MARK, "$^\\dagger$")
    return text.replace(BETTER, "$^{\\uparrow}$").replace(WORSE, "$^{\\downarrow}$")


def as_csv(table: Grid, transpose: bool = False) -> str:
    """Return CSV with fractions in full precision, and the ends of each interval in separate columns (or rows)."""
    # By task instead of heading, because programs read this file, and two columns may have equal labels.
    names = [f"{c.task} {c.metric or 'headline'}" for c in table.columns]
    ends = ["", " low", " high", *([" odd"] if table.notes else [])]
    lines = [["checkpoint", *table.heads, *(f"{name}{end}" for name in names for end in ends)]]
    for row in table.rows:
        cells = [(cell or (None,) * 4)[: len(ends)] for cell in row.cells]
        lines.append([row.name, *row.readout_cells, *("" if v is None else str(v) for cell in cells for v in cell)])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(zip(*lines, strict=True) if transpose else lines)
    return out.getvalue()


def _format_cells(
    table: Grid,
    transpose: bool,
    text: Callable[[Cell | None], str],
    bold: tuple[str, str],
    escape: Callable[[str], str] = lambda name: " ".join(name.split()).replace("|", "\\|"),
) -> tuple[list[str], list[str], list[list[str]]]:
    """Return the headings of columns, names of rows, and the cells."""
    best, cells = table.best or (None,) * len(table.columns), []
    for number, row in enumerate(table.rows):
        marked = [number == b for b in best]
        numbers = [bold[0] + text(c) + bold[1] if m else text(c) for c, m in zip(row.cells, marked, strict=True)]
        cells.append([*map(escape, row.readout_cells), *numbers])
    heads = [escape(head) for head in (*table.heads, *(c.heading for c in table.columns))]
    names = [escape(row.name) for row in table.rows]
    return (names, heads, [list(row) for row in zip(*cells, strict=True)]) if transpose else (heads, names, cells)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return cell.number + (f" ({cell.span})" if cell.span else "")


def _escape(text: str) -> str:
    text = " ".join(text.split())
    for sign in "\\&%$#_{}":
        text = text.replace(sign, "\\textbackslash " if sign == "\\" else "\\" + sign)
    return text.replace("~", "\\textasciitilde ").replace("^", "\\textasciicircum ")
