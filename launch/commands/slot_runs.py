"""Commands of `sparo slots`: score, select, mask, the tables of the paper, quality."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evals.encoders.loading import load_encoder
from evals.encoders.selection import (
    Selection,
    describe_selection,
    keep_units,
    read_selection,
    select_slots,
    write_selection,
)
from evals.report.results_file import refuse_unwritable
from evals.slots import selection_methods as choosing
from evals.slots.eval_inputs import Classes, Material, Pairs, Questions, make_pairs
from evals.slots.mask_study import Granularity, MaskRow, MaskTraining, mask_row, mask_selection, relative_change
from evals.slots.probe_tasks import ProbeTask
from evals.slots.quality_measures import refuse_same
from evals.slots.selection_report import ChoiceOptions, ChoiceReport, choose, complete_selection, four_column, report
from sparo_train.core.errors import ConfigError

from ..views import slot_tables
from ..views.terminal import console, out
from .slot_work import EITHER, Bench, SlotOptions, column_titles, is_readable, supported_unit_tasks, write_facts


def train_masks(
    checkpoint: str, task_name: str, report_on: list[str] | None, granularity: Granularity, trainings: Sequence[MaskTraining], held_out: bool,
    options: SlotOptions, path: Path, json_file: Path | None,
) -> None:  # fmt: skip
    """Train a mask per seed, write the first, and show the effect of all of them on other tasks."""
    refuse_unwritable(path.parent, f"--out {path}")
    row, written = _train_mask(
        checkpoint, column_titles([checkpoint])[0], task_name, report_on, granularity, trainings, held_out, options
    )
    write_selection(path, _with_own_texts(written, path))
    slot_tables.show(slot_tables.five_table([row]))
    out.print(f"wrote {path}: {describe_selection(written)}, of seed 0", soft_wrap=True)
    write_facts(json_file, {"rows": [_row_facts(row)]})


def table_five(
    checkpoints: Sequence[str], task_name: str, report_on: list[str], parts: int, trainings: Sequence[MaskTraining],
    options: SlotOptions, json_file: Path | None,
) -> None:  # fmt: skip
    """Print Table 5 for any checkpoints: masks per slot (or per part, without slots) and per value."""
    rows: list[MaskRow] = []
    for per in ("unit", "dimension"):
        for checkpoint, label in zip(checkpoints, column_titles(checkpoints), strict=True):
            # Both kinds of checkpoints are in one table: without slots, equal parts are used.
            either = replace(options, units=EITHER, parts=parts)
            rows.append(_train_mask(checkpoint, label, task_name, report_on, per, trainings, False, either)[0])
    rows = [_average_vtab(row) for row in rows]
    slot_tables.show(slot_tables.five_table(rows))
    write_facts(json_file, {"rows": [_row_facts(row) for row in rows]})


def _average_vtab(row: MaskRow) -> MaskRow:
    """Replace VTAB's tasks by their average, as in the paper; other tasks are unchanged."""
    vtab = {n: s for n, s in row.tasks.items() if n.startswith("vtab/")}
    # A single set is not an average of VTAB.
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
        raise ConfigError(
            "--units heads: a mask multiplies each value of an encoding by a weight, but every head contributes to "
            "all values. Use --units slots or --units parts."
        )
    bench = Bench(checkpoint, options)
    name, task = bench.single_task(task_name, "--task")
    tasks = {n: t for n, t in bench.tasks(report_on).items() if t.task == "zeroshot"}
    if not report_on:
        tasks = {n: t for n, t in tasks.items() if is_readable(n, t)}
    materials = bench.material({name: task, **tasks})
    pairs, classes = (
        make_pairs(name, materials.pop(name)),
        {n: m for n, m in materials.items() if isinstance(m, Classes)},
    )
    row, trained = mask_row(label, pairs, classes, per, trainings, held_out)
    return row, mask_selection(name, pairs, trained[0], per, trainings[0], held_out)


def _row_facts(row: MaskRow) -> dict[str, Any]:
    changes = {
        name: [relative_change((row.pairs[0], p), (initial, m)) for p, m in zip(row.pairs[1], masked, strict=True)]
        for name, (initial, masked) in row.tasks.items()
    }
    return {**row._asdict(), "relative_change": changes}


class SelectOptions(NamedTuple):
    """Options of `sparo slots select` besides the method.

    Attributes:
        task_name: the task to select on.
        report_tasks: tasks to report on; None: all that fit.
        slots: selected by hand.
        out, plot, json_file: files.
    """

    task_name: str
    report_tasks: list[str] | None
    slots: tuple[int, ...] | Path | None
    out: Path
    plot: Path | None
    json_file: Path | None


def score_units(
    checkpoint: str, task_names: list[str] | None, sort: str | None, options: SlotOptions, json_file: Path | None
) -> None:
    """Score each unit alone, and all without it, task by task."""
    bench = Bench(checkpoint, options)
    tasks = bench.tasks(task_names, "--task")
    materials = bench.material(
        tasks if task_names else _require_tasks(supported_unit_tasks(tasks, bench.encoder), checkpoint)
    )
    columns: dict[str, list[float]] = {}
    for name, each in materials.items():
        columns |= _columns(name, each)
    # A task's name alone means the score of units alone.
    sort = sort if sort is None or sort in columns else f"{sort} alone"
    if sort is not None and sort not in columns:
        raise ConfigError(
            f"--sort {sort.removesuffix(' alone')}: is not among the tasks shown ({', '.join(materials)})"
        )
    numbers = list(range(bench.units.number))
    if sort is not None:
        # The lower number first among ties, as everywhere.
        numbers.sort(key=lambda n: (-columns[sort][n], n))
    title = f"{checkpoint}: {bench.units.number} {bench.units.kind}, per cent"
    slot_tables.show(slot_tables.units_table(title, columns, numbers, {}))
    for name, each in materials.items():
        out.print(f"{name}: n = {_size(each)}" + (f", with all {100 * _full_accuracy(each):.1f}" if not isinstance(each, ProbeTask) else ""))  # fmt: skip
    write_facts(
        json_file,
        {"checkpoint": checkpoint, "sha256": bench.encoder.weights, "units": options.units, "scores": columns},
    )


def _columns(name: str, each: Material) -> dict[str, list[float]]:
    if isinstance(each, Classes):
        answers = each.each()
        table = {"alone": answers.single_unit, "without": answers.without}
        return {f"{name} {how}": right.double().mean(0).tolist() for how, right in table.items()}
    if isinstance(each, ProbeTask):
        return {f"{name} alone": each.single_unit().double().mean(0).tolist()}
    margins = each.margins()
    total = margins.values.sum(1, keepdim=True) + margins.fixed[:, None]
    without = margins.accuracy(margins.right_answers((total - margins.values).transpose(1, 2)))
    return {f"{name} alone": choosing.accuracies(margins).tolist(), f"{name} without": without.tolist()}


def _full_accuracy(each: Classes | Pairs | Questions) -> float:
    if isinstance(each, Classes):
        return float(each.each().whole.double().mean())
    margins = each.margins()
    return float(margins.accuracy(margins.right_answers(margins.values.sum(1) + margins.fixed)))


def _size(each: Material) -> int:
    if isinstance(each, Questions):
        return len(each.questions)
    return len(each.caption_pairs) if isinstance(each, Pairs) else len(each.labels)


def _require_tasks(tasks: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    if not tasks:
        raise ConfigError(
            f"{checkpoint}: has no task of kind zeroshot, pairs, choice, matching, paraphrases or knn. Choose tasks "
            "from the --data file, or tasks that `sparo eval --list` shows."
        )
    return tasks


def select_units(
    checkpoint: str, select_options: SelectOptions, choice_options: ChoiceOptions, options: SlotOptions
) -> None:
    """Select units, write the file, and report scores."""
    refuse_unwritable(select_options.out.parent, f"--out {select_options.out}")
    if select_options.plot is not None:
        refuse_unwritable(select_options.plot.parent, f"--plot {select_options.plot}")
    bench = Bench(checkpoint, options)
    name, task = bench.single_task(select_options.task_name, "--task")
    tasks = (
        bench.tasks(select_options.report_tasks)
        if select_options.report_tasks
        else supported_unit_tasks(bench.tasks(None) if _has_tasks(bench) else {}, bench.encoder)
    )
    materials = bench.material({name: task, **tasks})
    selection = choose(name, materials[name], choice_options, options.classifier_slots, options.head_layers)
    if select_options.slots is not None:
        selection = _manual_selection(bench, select_options.slots, selection, choice_options)
    task_names = list(tasks) if select_options.report_tasks else list(materials)
    # The requested tasks, or all that there are, including the task of the selection.
    reports = [report(each, materials[each], selection, choice_options) for each in task_names]
    write_selection(select_options.out, _with_own_texts(selection, select_options.out))
    provenance = (
        f"selected on {selection.made_on.task} (n = {selection.made_on.n})" if selection.made_on.data else "by hand"
    )
    title = f"{checkpoint}: {describe_selection(selection)}, {provenance}"
    slot_tables.show(slot_tables.report_table(title, reports, len(selection.chosen), selection.count, selection.units))
    out.print(f"{select_options.out}: {selection.units} {' '.join(map(str, selection.chosen))}", soft_wrap=True)
    _print_next_command(checkpoint, select_options.out, reports, options.classifier_slots == "renorm")
    write_facts(
        select_options.json_file,
        {"selection": json.loads(selection.model_dump_json(by_alias=True)), "reports": [r.as_dict() for r in reports]},
    )
    if select_options.plot is not None:
        from evals.report.plots import draw_curves

        draw_curves({r.task: r.as_dict() for r in reports}, len(selection.chosen), title, select_options.plot)
        out.print(str(select_options.plot), soft_wrap=True)


def _with_own_texts(selection: Selection, path: Path) -> Selection:
    """Return a selection with the names and notes of the file that it replaces, if they are about the same units."""
    if not path.is_file():
        return selection
    try:
        old = read_selection(path)
    except ConfigError:  # another file, or a damaged one
        return selection
    if (old.checkpoint, old.units, old.count) != (selection.checkpoint, selection.units, selection.count):
        return selection
    return selection.model_copy(update={"names": old.names, "notes": old.notes})


def _has_tasks(bench: Bench) -> bool:
    try:
        return bool(bench.tasks(None))
    except ConfigError:  # a checkpoint without a run, whose tasks are from the catalogue
        return False


def _manual_selection(
    bench: Bench, slots: tuple[int, ...] | Path, ranked: Selection, choice_options: ChoiceOptions
) -> Selection:
    """Return a selection made by hand; its data are unknown, so nothing counts as held out."""
    if isinstance(slots, Path):
        selection = read_selection(slots)
        keep_units(bench.encoder, selection, f"--slots {slots}")
        if (selection.units, selection.count) != (ranked.units, ranked.count):
            raise ConfigError(
                f"--slots {slots}: was saved for a model with {selection.count} {selection.units}, but this one has "
                f"{ranked.count} {ranked.units}."
            )
        if selection.mask:
            raise ConfigError(
                f"--slots {slots}: contains a mask instead of selected units. Score the mask with `sparo eval --slots`."
            )
        return complete_selection(selection, ranked.order)
    selection = select_slots(bench.encoder, slots) if bench.options.units == "slots" else None
    if selection is None:
        raise ConfigError(
            f"--slots: slot numbers cannot select units other than slots, got --units {bench.options.units}. Remove "
            "--units, or name a selection.json."
        )
    return complete_selection(selection.model_copy(update={"scores": ranked.scores}), ranked.order)


def _print_next_command(checkpoint: str, path: Path, reports: Sequence[ChoiceReport], renormed: bool) -> None:
    if renormed:
        console.print(
            "sparo eval does not normalize the slots of class vectors again (as --classifier-slots slice), so its scores with this file differ from those above"
        )
    if any(r.share == "same data" for r in reports):
        console.print(
            "rows with 'same data' use the images of the selection, so their gain is too high; use --held-out or report other tasks"
        )
    console.print(f"next: {shlex.join(['sparo', 'eval', checkpoint, '--slots', str(path)])}", soft_wrap=True)


def table_four(
    checkpoints: Sequence[str],
    task_name: str,
    pairs_name: str,
    choice_options: ChoiceOptions,
    options: SlotOptions,
    json_file: Path | None,
) -> None:
    """Print Table 4 for any checkpoints with slots."""
    columns = []
    for checkpoint, label in zip(checkpoints, column_titles(checkpoints), strict=True):
        bench = Bench(checkpoint, options)
        (name, task), (other, second) = (
            bench.single_task(task_name, "--task"),
            bench.single_task(pairs_name, "--report-tasks"),
        )
        materials = bench.material({name: task, other: second})
        classes, pairs = materials[name], materials[other]
        if not isinstance(classes, Classes):
            raise ConfigError(f"--task {name}: Table 4 requires a selection task of kind `zeroshot`, got {task.task}.")
        if not isinstance(pairs, Pairs):
            raise ConfigError(
                f"--report-tasks {other}: Table 4 scores pairs of captions, got {second.task}. Name a task of kind `pairs`."
            )
        columns.append(four_column(label, name, classes, pairs, choice_options))
    slot_tables.show(slot_tables.four_table(columns))
    out.print(
        f"{columns[0].n} pairs; per cent with 95 % intervals; random: mean of {choice_options.draws} random choices"
    )
    write_facts(json_file, {"columns": [column._asdict() for column in columns]})


def show_quality(
    checkpoints: Sequence[str],
    task_name: str,
    judge_checkpoint: str | None,
    options: SlotOptions,
    json_file: Path | None,
) -> None:
    """Print one row per checkpoint: quality of its slots (or equal parts of its encodings) on a task's images."""
    judge = load_encoder(judge_checkpoint) if judge_checkpoint is not None else None
    rows = []
    for checkpoint, label in zip(checkpoints, column_titles(checkpoints), strict=True):
        bench = Bench(checkpoint, replace(options, units=EITHER))
        _, task = bench.single_task(task_name, "--task")
        if judge is not None:
            refuse_same(bench.encoder, judge)
        rows.append(bench.quality(label, task, judge))
    slot_tables.show(slot_tables.quality_table(rows, judge_checkpoint))
    write_facts(json_file, {"rows": [row._asdict() for row in rows], "by": judge_checkpoint})
