"""`sparo slots name`: names for slots, tested on held-out images, and stored with a selection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evals.encoders.selection import Selection, write_selection
from evals.report.results_file import refuse_unwritable
from evals.sets.base import EvalSet, lines
from evals.slots.eval_inputs import open_images
from evals.slots.naming import Naming, caption_words, contain_names, name_slots
from evals.slots.units import get_text_tower
from sparo_train.core.errors import ConfigError

from ..views import slot_tables
from ..views.terminal import out
from .slot_work import Bench, SlotOptions, write_facts

_MAX_NAMES = 2000  # names that are compared
_NOTE = "Held-out AUC:"  # beginning of notes that this command writes


class NameOptions(NamedTuple):
    """Options of `sparo slots name`.

    Attributes:
        task_name: task with captions or classes.
        vocabulary: file with one name per line; None: the words of the captions.
        template: prompt with `{c}` for the name.
        per_slot: number of names per slot.
        min_images: images of each half that must have a name, and that must not.
        seed: seed of the halves.
        replace: replace names that the selection has.
        out, json_file: files.
    """

    task_name: str
    vocabulary: Path | None
    template: str
    per_slot: int
    min_images: int
    seed: int
    replace: bool
    out: Path
    json_file: Path | None


def name_units(checkpoint: str, name_options: NameOptions, options: SlotOptions) -> None:
    """Name slots, print the tests, and write the names to the selection."""
    refuse_unwritable(name_options.out.parent, f"--out {name_options.out}")
    if "{c}" not in name_options.template:
        raise ConfigError(f"--template {name_options.template!r}: must contain {{c}}, which stands for the name.")
    vocabulary = None if name_options.vocabulary is None else _read_names(name_options.vocabulary)
    bench = Bench(checkpoint, options)
    tower = get_text_tower(bench.units)
    selection = _open_selection(bench, name_options.out)
    name, task = bench.single_task(name_options.task_name, "--task")
    source = open_images(task)
    features = bench.images(source)
    captions = captions_of_set(source, list(features.facts))
    if captions is None:
        raise ConfigError(
            f"--task {name}: has no captions and no classes, so slot names cannot be tested on it. Choose another task."
        )
    # An image that the set contains several times is one image, so that no copy is in the other half.
    merged: dict[int, list[str]] = {}
    for first, texts in zip(features.first_copies, captions, strict=True):
        merged.setdefault(first, []).extend(texts)
    captions = list(merged.values())
    names = vocabulary or caption_words(captions, _MAX_NAMES)
    naming = name_slots(
        bench.units.images(features.rows(torch.tensor(list(merged)))),
        bench.units.texts(tower.text([name_options.template.replace("{c}", one) for one in names]).cpu()),
        names,
        contain_names(captions, names),
        name_options.per_slot,
        name_options.min_images,
        name_options.seed,
    )
    out.print(slot_tables.names_table(f"{checkpoint}: names of slots on {name}", naming))
    written = _with_names(selection, naming, name_options.replace)
    write_selection(name_options.out, written)
    changed = sum(written.names.get(one.slot) != selection.names.get(one.slot) for one in naming.slots)
    kept = len(written.names) - sum(written.names[slot] != selection.names.get(slot) for slot in written.names)
    out.print(f"{name_options.out}: {changed} names written or removed, {kept} unchanged", soft_wrap=True)
    slots = [
        {**one._asdict(), "tests": [test._asdict() for test in one.tests], "passing": one.passing}
        for one in naming.slots
    ]
    write_facts(name_options.json_file, {**naming._asdict(), "checkpoint": checkpoint, "task": name, "slots": slots})


def _read_names(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"--vocabulary {path}: file not found. Name a text file with one name per line.")
    names = list({name.casefold(): name for name in reversed(lines(path))}.values())[::-1]  # the first spelling of each
    if not 0 < len(names) <= _MAX_NAMES:
        raise ConfigError(f"--vocabulary {path}: expected 1 to {_MAX_NAMES} names, one per line, got {len(names)}.")
    return names


def captions_of_set(source: EvalSet, facts: Sequence[Any]) -> list[list[str]] | None:
    """Return the captions of each image, or the name of its class; None if there is neither."""
    if source.kind in ("captions", "questions"):
        return [list(fact) for fact in facts]
    if source.kind == "pairs":
        return [[pair.caption for pair in fact] for fact in facts]
    if source.kind == "label":
        classes = source.classnames()
        return [[classes[int(fact)]] for fact in facts]
    return None


def _open_selection(bench: Bench, path: Path) -> Selection:
    if path.is_dir():
        raise ConfigError(f"--out {path}: is a folder. Name a .json file.")
    if not path.exists():
        return Selection(
            checkpoint=bench.encoder.weights,
            label=bench.checkpoint,
            units=bench.units.kind,
            count=bench.units.number,
            chosen=tuple(range(bench.units.number)),
        )
    return bench.read_selection(path, "--out")


def _with_names(selection: Selection, naming: Naming, replace: bool) -> Selection:
    """Add names, and their tests as notes. Names that exist stay, unless `replace`; notes of the user always stay."""
    names, notes = dict(selection.names), dict(selection.notes)
    for one in naming.slots:
        generated = notes.get(one.slot, _NOTE).startswith(_NOTE)
        if one.slot in names and not replace:
            continue
        if generated:  # an earlier name that does not pass any more
            names.pop(one.slot, None)
            notes.pop(one.slot, None)
        if not one.passing:
            continue
        names[one.slot] = ", ".join(one.passing)
        tests = "; ".join(f"{t.name} {t.auc:.2f} ({t.low:.2f} to {t.high:.2f})" for t in one.tests)
        if generated:
            notes[one.slot] = f"{_NOTE} {tests}. Names of other slots: {one.shuffled:.2f}."
    return selection.model_copy(update={"names": names, "notes": notes})
