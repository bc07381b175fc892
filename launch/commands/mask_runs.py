"""`sparo slots mask` and `sparo slots table 5`: masks of encodings, trained on pairs of captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.encoders.selection import Selection, described, write_selection
from evals.report.results_file import refuse_unwritable
from evals.slots.eval_inputs import Classes, Pairs
from evals.slots.mask_study import Granularity, MaskRow, mask_row, mask_selection, relative_change
from evals.slots.masks import MaskTraining
from sparo_train.core.errors import ConfigError

from ..views import slot_tables
from ..views.terminal import out
from .slot_work import EITHER, Bench, SlotOptions, column_titles, write_facts


def train_masks(
    checkpoint: str, task_name: str, report_on: list[str] | None, granularity: Granularity, trainings: Sequence[MaskTraining], held_out: bool,
    options: SlotOptions, path: Path, json_file: Path | None,
) -> None:  # fmt: skip
    """Train a mask per seed, write the first, and show what all of them do elsewhere."""
    refuse_unwritable(path.parent, f"--out {path}")
    row, written = _train_mask(
        checkpoint, column_titles([checkpoint])[0], task_name, report_on, granularity, trainings, held_out, options
    )
    write_selection(path, written)
    slot_tables.show(slot_tables.five_table([row]))
    out.print(f"{path}: {described(written)}; seed 0", soft_wrap=True)
    write_facts(json_file, {"rows": [_row_facts(row)]})


def table_five(
    checkpoints: Sequence[str], task_name: str, report_on: list[str], parts: int, trainings: Sequence[MaskTraining],
    options: SlotOptions, json_file: Path | None,
) -> None:  # fmt: skip
    """Table 5 for any checkpoints: masks per slot (or per part, where there are none) and per number."""
    rows: list[MaskRow] = []
    for per in ("unit", "dimension"):
        for checkpoint, label in zip(checkpoints, column_titles(checkpoints), strict=True):
            # Both kinds of checkpoints stand in one table: where there are no slots, equal parts are in their place.
            either = replace(options, units=EITHER, parts=parts)
            rows.append(_train_mask(checkpoint, label, task_name, report_on, per, trainings, False, either)[0])
    rows = [_average_vtab(row) for row in rows]
    slot_tables.show(slot_tables.five_table(rows))
    write_facts(json_file, {"rows": [_row_facts(row) for row in rows]})


def _average_vtab(row: MaskRow) -> MaskRow:
    """VTAB's tasks as their average, as the paper has it; other tasks as they are."""
    vtab = {n: s for n, s in row.tasks.items() if n.startswith("vtab/")}
    # A single set is no average of VTAB.
    if len(vtab) < 2:
        return row
    rest = {n: s for n, s in row.tasks.items() if n not in vtab}
    initial = sum(s[0] for s in vtab.values()) / len(vtab)
    masked = [sum(values) / len(vtab) for values in zip(*(s[1] for s in vtab.values()), strict=True)]
    return row._replace(tasks={f"VTAB avg of {len(vtab)}": (initial, masked), **rest})


def _train_mask(
    checkpoint: str, label: str, task_name: str, report_on: list[str] | None, per: Granularity, trainings: Sequence[MaskTraining], held_out: bool,
    options: SlotOptions,
) -> tuple[MaskRow, Selection]:  # fmt: skip
    if options.units == "heads":
        raise ConfigError("--units heads: a mask is of the numbers of an encoding, and heads share all of them")
    bench = Bench(checkpoint, options)
    name, task = bench.single_task(task_name, "--task")
    tasks = {n: t for n, t in bench.tasks(report_on).items() if t.task == "zeroshot"}
    materials = bench.material({name: task, **tasks})
    pairs, classes = materials.pop(name), {n: m for n, m in materials.items() if isinstance(m, Classes)}
    if not isinstance(pairs, Pairs):
        raise ConfigError(f"--task {name}: masks are trained on a task of kind pairs, and this is {task.task}")
    row, trained = mask_row(label, pairs, classes, per, trainings, held_out)
    return row, mask_selection(name, pairs, trained[0], per, trainings[0], held_out)


def _row_facts(row: MaskRow) -> dict[str, Any]:
    changes = {
        name: [relative_change((row.pairs[0], p), (initial, m)) for p, m in zip(row.pairs[1], masked, strict=True)]
        for name, (initial, masked) in row.tasks.items()
    }
    return {**row._asdict(), "relative_change": changes}
