"""Tables of results before formatting: the tables of the SPARO paper and others, by task and metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

from sparo_train.core.errors import ConfigError, did_you_mean

from ..tasks.result import Result
from .compare import different_options
from .grid import MARK, Cell, Column, Grid, Row
from .results_file import Record, by_checkpoint
from .significance import with_significance
from .suite_layouts import SUITE_LAYOUTS, SUITE_TITLES


def _imagenets() -> list[Column]:
    names = {"V1": "imagenet1k", "V2": "imagenetv2", "Sketch": "imagenet_sketch", "A": "imagenet-a", "R": "imagenet-r"}
    return [Column("ImageNet-", label, task, "acc1") for label, task in names.items()]


def _retrievals() -> list[Column]:
    sets = {"COCO": "mscoco_captions", "F8k": "flickr8k", "F30k": "flickr30k"}
    kinds = {"Image R@5": "image_R@5", "Text R@5": "text_R@5"}
    return [Column(group, label, task, metric) for group, metric in kinds.items() for label, task in sets.items()]


def _sugar_crepe() -> list[Column]:
    splits = {
        "Replace": {"Object": "replace_obj", "Attribute": "replace_att", "Relation": "replace_rel"},
        "Swap": {"Object": "swap_obj", "Attribute": "swap_att"},
        "Add": {"Object": "add_obj", "Attribute": "add_att"},
        "": {"Avg": "macro"},
    }
    return [
        Column(g, label, "sugar_crepe", metric) for g, columns in splits.items() for label, metric in columns.items()
    ]


_RECOGNITION = [
    *_imagenets(),
    Column("", "ObjectNet", "objectnet", "acc1"),
    Column("", "SugarCrepe", "sugar_crepe", "macro"),
]
LAYOUTS = {
    "1": _RECOGNITION,
    "2": _retrievals(),
    "3": [
        Column("ImageNet", "CLIP probe", "imagenet1k:probe", "acc1"),
        Column("ImageNet", "20-NN", "knn", "acc1_k20"),
        Column("ImageNet", "DINO linear", "linear", "acc1"),
    ],
    "6": [Column("ImageNet", "zero-shot", "imagenet1k", "acc1")],
    "B.1": _sugar_crepe(),
    "B.2": _RECOGNITION,
    **SUITE_LAYOUTS,
}
TITLES = {
    "1": "Zero-shot recognition, robustness, compositionality (layout of Table 1)",
    "2": "Zero-shot retrieval, hit rate at 5 (layout of Table 2)",
    "3": "ImageNet linear probes and nearest neighbours (layout of Table 3)",
    "6": "Bottleneck and alignment of heads (layout of Table 6)",
    "B.1": "SugarCrepe (layout of Table B.1)",
    "B.2": "Other bottlenecks (layout of Table B.2)",
    **SUITE_TITLES,
}
# Text columns of Table 6, before the score.
HEADS = ("Replace last block", "Cross-attention", "Slot-wise LayerNorm", "Slot-wise projection", "Params")
UNKNOWN_READOUT = ("–",) * len(HEADS)  # placeholder for a checkpoint whose recipe is not available
_NONE = "N/A"


def readout_cells(objective: Any, parameters: int) -> tuple[str, ...]:
    """Return the text columns of Table 6 for a recipe with this number of trained parameters; N/A without a readout or such a key."""
    # Tables may contain any method, also one whose model has no readout.
    readout = getattr(getattr(objective, "model", None), "readout", None)
    placement = getattr(readout, "placement", None)
    attention = getattr(readout, "cross_attention", None)
    return (
        _NONE if placement is None or attention is None else _answer(placement.replaced > 0),
        _NONE if attention is None else attention.replace("_", "-").capitalize(),
        *(_answer(getattr(readout, key, None)) for key in ("slot_layer_norm", "slot_projection")),
        f"{parameters / 1e6:.1f}M",
    )


def _answer(value: bool | None) -> str:
    return _NONE if value is None else "Yes" if value else "No"


def grid(
    records: Sequence[Record],
    layout: str | None,
    paper: Sequence[str] = (),
    readout_cells_of: Callable[[str], tuple[str, ...]] = lambda name: UNKNOWN_READOUT,
    reference: str | None = None,
) -> Grid:
    """Return a table with checkpoints as rows; the best of a column is marked if it is significantly better than all others.

    Args:
        records: the results.
        layout: a key of `LAYOUTS`; None: every task's headline.
        paper: training sets (`CC15M`, …) whose printed rows are added below, or `all`; only with a layout.
        readout_cells_of: for layout 6, returns the text columns of a checkpoint by name; default: dashes.
        reference: row with which the others are compared.

    Raises:
        ConfigError: no such layout, or printed rows without one.
    """
    table = by_checkpoint(records)
    if layout in SUITE_LAYOUTS and paper:
        raise ConfigError(
            f"--paper {','.join(paper)}: the SPARO paper has no table with layout {layout}. Remove --paper."
        )
    if layout is None and paper:
        raise ConfigError(
            f"--paper {','.join(paper)}: the paper's rows need a table with --layout, but --layout is not set. "
            f"Choose one of {', '.join(LAYOUTS)}."
        )
    if layout is None:
        tasks = dict.fromkeys(record.task for record in records)
        # In the order of scoring, which is that of the recipe.
        columns = [Column("", task, task, None) for task in tasks]
    else:
        columns = find_columns(layout)
    heads = HEADS if layout == "6" else ()
    rows = [
        Row(
            name,
            [_make_cell(column, by_task) for column in columns],
            readout_cells=readout_cells_of(name) if heads else (),
        )
        for name, by_task in table.items()
    ]
    if layout in SUITE_LAYOUTS:
        columns, rows, notes = _without_empty(layout, columns, rows, {record.task for record in records})
        notes += _baseline_notes(columns, records)
    else:
        notes = list[str]()
    if layout is not None:
        rows += paper_rows(layout, paper)
    tasks = dict.fromkeys(task for column in columns for task in column.tasks)
    odd = [(name, t, record.result.odd()) for name, found in table.items() for t, record in found.items() if t in tasks]
    notes += odd_notes(odd)
    notes += [
        f"{name}: {remark}" for name, found in table.items() if (remark := _describe_mixture(list(found.values())))
    ]
    of_several = {
        t: remark for t in tasks if (remark := describe_different_data([f[t] for f in table.values() if t in f]))
    }
    notes += of_several.values()
    notes += describe_precisions([record for found in table.values() for t, record in found.items() if t in tasks])
    notes = [" ".join(note.split()) for note in notes]  # a name with a line feed would end a comment in LaTeX
    found = Grid(TITLES.get(layout or "", "Results"), columns, rows, notes, unranked=frozenset(of_several), heads=heads)
    return with_significance(found, table, reference)


def _without_empty(
    layout: str, columns: list[Column], rows: list[Row], tasks: set[str]
) -> tuple[list[Column], list[Row], list[str]]:
    """Return the columns in which a row has a score, and a note with the others. Raises `ConfigError` if there are none."""
    kept = [i for i in range(len(columns)) if any(row.cells[i] is not None for row in rows)]
    absent = dict.fromkeys(column.task for i, column in enumerate(columns) if i not in kept)
    if not kept:
        sets = {task for column in columns for task in column.tasks}
        raise ConfigError(
            f"--layout {layout}: only {len(sets & tasks)} of the layout's {len(sets)} data sets are scored, too few for any column. Score the "
            f"others with sparo eval --suite {layout}, or choose another layout."
        )
    rows = [row._replace(cells=[row.cells[i] for i in kept]) for row in rows]
    return [columns[i] for i in kept], rows, [f"no results: {', '.join(absent)}"] if absent else []


def _baseline_notes(columns: Sequence[Column], records: Sequence[Record]) -> list[str]:
    """Return chance and the best guess from captions alone for each set of questions; both are the same for all checkpoints."""
    results = {record.task: record.result for record in records}
    known = [(column, results[column.task]) for column in columns if column.task in results and not column.members]
    tasks = {column.task: (column, result) for column, result in known if "blind" in result.metrics}
    parts = [
        f"{column.group} {column.label}".rstrip() + f" {100 * result.metrics['blind']:.1f} ({100 * result.chance:.1f})"
        for column, result in tasks.values()
    ]
    return [f"best guess from the captions alone (chance): {', '.join(parts)}"] if parts else []


def _make_cell(column: Column, by_task: Mapping[str, Record]) -> Cell | None:
    if not column.members:
        return _cell(by_task[column.task].result, column.metric) if column.task in by_task else None
    # A mean of some of its members would be another number.
    cells = [_cell(by_task[task].result, metric) for task, metric in column.members if task in by_task]
    known = [cell for cell in cells if cell is not None]
    if len(known) < len(column.members):
        return None
    value = sum(cell.value for cell in known) / len(known)
    half = sum(((cell.high or 0.0) - (cell.low or 0.0)) ** 2 for cell in known) ** 0.5 / (2 * len(known))
    return Cell(value, value - half, value + half, any(cell.odd for cell in known), known[0].metric)


def find_columns(layout: str) -> list[Column]:
    """Return the columns of a table of the paper. Raises `ConfigError` with a suggestion."""
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout}: {did_you_mean(layout, LAYOUTS)}")
    return LAYOUTS[layout]


def odd_notes(odd: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return explanations of marked cells for (checkpoint, task, odd data), one per task and reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, task, text in odd:
        if text:
            names.setdefault((task, text), []).append(name)
    return [f"{MARK} {_list_names(found)}: {task}: {text}" for (task, text), found in names.items()]


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} others"


def describe_different_data(records: Sequence[Record]) -> str:
    """Return a message if results of one task are not on the same samples; otherwise empty."""
    # Results of a plug-in may have no identity of the data; then at least the size must be equal.
    if len({record.dataset or record.result.n for record in records}) < 2:
        # The size of masks is that of a model's input, which differs between models.
        keys = sorted({key for record in records for key in different_options(records[0], record)} - {"mask_size"})
        return (
            f"{records[0].task}: rows were scored with different {', '.join(keys)}; the best is not marked"
            if keys
            else ""
        )
    sizes = sorted({record.result.n for record in records})
    sizes_text = f"n {', '.join(map(str, sizes))}" if len(sizes) > 1 else f"n {sizes[0]} each"
    what = "another loss, or other clips of it" if records[0].result.task == "validation_loss" else "a part of it"
    return f"{records[0].task}: rows were not scored on the same samples ({sizes_text}): another set, or {what}; the best is not marked"


def describe_precisions(records: Sequence[Record]) -> list[str]:
    """Return a note if not all scores were computed in one precision; empty otherwise."""
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(str(record.facts.get("precision") or "fp32"), []).append(record.checkpoint)
    if len(names) < 2:
        return []
    lists = (f"{precision}: {_list_names(list(dict.fromkeys(found)))}" for precision, found in sorted(names.items()))
    return [f"scores were computed in different precisions ({'; '.join(lists)})"]


def _describe_mixture(records: Sequence[Record]) -> str:
    """Return what differs between records of one name: a file that was rewritten, or another precision."""
    record_facts = [r.facts for r in records if r.facts.get("checkpoint")]
    facts = {
        "weights": {f["checkpoint"].get("sha256") for f in record_facts},
        "precision": {f.get("precision") for f in record_facts},
        "storage": {f.get("storage") for f in record_facts},
        "selected units": {str(f["selection"]) for f in record_facts if "selection" in f},
    }
    odd = [name for name, values in facts.items() if len(values) > 1]
    return f"its scores differ in {' and '.join(odd)}. Score it again on all tasks." if odd else ""


def _cell(result: Result, metric: str | None) -> Cell | None:
    name = metric or result.headline
    if name not in result.metrics:
        return None
    # The headline always has an interval; other metrics may not.
    low, high = result.interval if name == result.headline else result.intervals.get(name, (None, None))
    return Cell(result.metrics[name], low, high, bool(result.odd()), name)


def paper_rows(layout: str, training_sets: Sequence[str]) -> list[Row]:
    """Return the paper's rows for these training sets (or `all`). Raises `ConfigError` for one that the table does not have."""
    text = (resources.files("evals.report") / "paper.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text).get(layout, [])
    choices = [*dict.fromkeys(data for data, *_ in rows), "all"]
    for word in training_sets:
        if word not in choices:
            raise ConfigError(
                f"--paper {word}: layout {layout} has no rows of this name; {did_you_mean(word, choices)}"
            )
    return [
        Row(
            f"paper: {data} {model}",
            [None if v is None else Cell(v) for v in values if not isinstance(v, list)],
            True,
            # Text columns are a separate list after the numbers.
            tuple(word for v in values if isinstance(v, list) for word in v),
        )
        for data, model, *values in rows
        if "all" in training_sets or data in training_sets
    ]
