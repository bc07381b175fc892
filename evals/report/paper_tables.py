"""Tables of results before formatting: the tables of the SPARO paper and others, by task and metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import yaml

from sparo_train.core.errors import ConfigError, did_you_mean

from ..tasks.result import Result, format_metric, is_share
from .results_file import Record, by_checkpoint


class Column(NamedTuple):
    """A column with label and `group`, the heading above it; metric None is the task's headline."""

    group: str
    label: str
    task: str
    metric: str | None

    @property
    def heading(self) -> str:
        """Return group and label on one line."""
        return f"{self.group} {self.label}".strip()


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
}
TITLES = {
    "1": "Zero-shot recognition, robustness, compositionality (layout of Table 1)",
    "2": "Zero-shot retrieval, hit rate at 5 (layout of Table 2)",
    "3": "ImageNet linear probes and nearest neighbours (layout of Table 3)",
    "6": "Bottleneck and alignment of heads (layout of Table 6)",
    "B.1": "SugarCrepe (layout of Table B.1)",
    "B.2": "Other bottlenecks (layout of Table B.2)",
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


MARK = "†"


class Cell(NamedTuple):
    """A score with its 95 % interval if there is one; `odd` describes data that differ from the task's name."""

    value: float
    low: float | None = None
    high: float | None = None
    odd: bool = False
    metric: str = ""

    @property
    def number(self) -> str:
        """Return the score in per cent or with its unit, marked if the data are odd."""
        return f"{format_metric(self.metric, self.value, unit=True)}{MARK if self.odd else ''}"

    @property
    def span(self) -> str:
        """Return the interval; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        # A dash would look like another minus sign.
        between = " to " if self.low < 0 else "–"
        return f"{format_metric(self.metric, self.low)}{between}{format_metric(self.metric, self.high)}"


class Row(NamedTuple):
    """A row; `paper`: printed in the SPARO paper, not measured; readout_cells: text columns."""

    name: str
    cells: list[Cell | None]
    paper: bool = False
    readout_cells: tuple[str, ...] = ()


class Grid(NamedTuple):
    """A table before formatting.

    Attributes:
        notes: explanations of marked cells, one per line.
        spans: meaning of the brackets.
        unranked: tasks whose scores are not on the same samples, so none is the best.
        heads: headings of text columns before the scores.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str]
    spans: str = "95 % intervals"
    unranked: frozenset[str] = frozenset()
    heads: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Return the unit of its cells."""
        metrics = {cell.metric for row in self.rows for cell in row.cells if cell is not None}
        return "per cent" if all(map(is_share, metrics)) else "per cent where no unit stands"


def grid(
    records: Sequence[Record],
    layout: str | None,
    paper: Sequence[str] = (),
    readout_cells_of: Callable[[str], tuple[str, ...]] = lambda name: UNKNOWN_READOUT,
) -> Grid:
    """Return a table with checkpoints as rows.

    Args:
        records: the results.
        layout: a key of `LAYOUTS`; None: every task's headline.
        paper: training sets (`CC15M`, …) whose printed rows are added below, or `all`; only with a layout.
        readout_cells_of: for layout 6, returns the text columns of a checkpoint by name; default: dashes.

    Raises:
        ConfigError: no such layout, or printed rows without one.
    """
    table = by_checkpoint(records)
    if layout is None and paper:
        raise ConfigError(f"--paper {','.join(paper)}: the paper's rows need a --layout: {', '.join(LAYOUTS)}")
    if layout is None:
        tasks = dict.fromkeys(record.task for record in records)
        # In the order of scoring, which is that of the recipe.
        columns = [Column("", task, task, None) for task in tasks]
    else:
        columns = columns_of(layout)
    heads = HEADS if layout == "6" else ()
    rows = [
        Row(
            name,
            [_cell(by_task[c.task].result, c.metric) if c.task in by_task else None for c in columns],
            readout_cells=readout_cells_of(name) if heads else (),
        )
        for name, by_task in table.items()
    ]
    if layout is not None:
        rows += paper_rows(layout, paper)
    tasks = dict.fromkeys(column.task for column in columns)
    odd = [(name, t, record.result.odd()) for name, found in table.items() for t, record in found.items() if t in tasks]
    notes = odd_notes(odd)
    notes += [f"{name}: {remark}" for name, found in table.items() if (remark := _mixed(list(found.values())))]
    of_several = {t: remark for t in tasks if (remark := several_data([f[t] for f in table.values() if t in f]))}
    notes += of_several.values()
    notes = [" ".join(note.split()) for note in notes]  # a name with a line feed would end a comment in LaTeX
    return Grid(TITLES.get(layout or "", "Results"), columns, rows, notes, unranked=frozenset(of_several), heads=heads)


def columns_of(layout: str) -> list[Column]:
    """Return the columns of a table of the paper. Raises `ConfigError` with a suggestion."""
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout}: {did_you_mean(layout, LAYOUTS)}")
    return LAYOUTS[layout]


def odd_notes(odd: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return explanations of marked cells for (checkpoint, task, odd data)."""
    return [f"{MARK} {name}: {task}: {text}" for name, task, text in odd if text]


def several_data(records: Sequence[Record]) -> str:
    """Return a message if results of one task are not on the same samples; otherwise empty."""
    # Results of a plug-in may have no identity of the data; then at least the size must be equal.
    if len({record.dataset or record.result.n for record in records}) < 2:
        return ""
    sizes = sorted({record.result.n for record in records})
    sizes_text = f"n {', '.join(map(str, sizes))}" if len(sizes) > 1 else f"n {sizes[0]} each"
    what = "another loss, or other clips of it" if records[0].result.task == "validation_loss" else "a part of it"
    return f"{records[0].task}: rows were not scored on the same samples ({sizes_text}): another set, or {what}; the best is not marked"


def _mixed(records: Sequence[Record]) -> str:
    """Return what differs between records of one name: a file that was rewritten, or another precision."""
    record_facts = [r.facts for r in records if r.facts.get("checkpoint")]
    facts = {
        "weights": {f["checkpoint"].get("sha256") for f in record_facts},
        "precision": {f.get("precision") for f in record_facts},
        "storage": {f.get("storage") for f in record_facts},
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
    rows = yaml.safe_load(text)[layout]
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
